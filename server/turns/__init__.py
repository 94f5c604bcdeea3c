"""Turns: one request's generation, from its prompt to its commit.

Owns: submitting choices, merging their deltas, the receipt, the commit, replaying a turn by its
idempotency key.

May import: ``server.chat``, ``server.engine``, ``server.log``, ``server.http``,
``server.telemetry``.

Never knows: the shapes of any one API's replies.
"""
