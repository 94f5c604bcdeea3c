"""Read-only links to branches of sessions: made, listed, revoked with a key, and read without one.

Owns: their routes and shapes.

May import: ``server.api.sessions``, ``server.log``.

Never knows: turns that run, other APIs.
"""
