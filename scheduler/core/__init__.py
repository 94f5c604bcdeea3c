"""The engine's loop: which turns run, which token is drawn for each, and when a turn ends.

Owns: admission, the queue, steps, sampling, constraints, stop decisions, text.

May import: ``scheduler.model``, ``cache``.

Never knows: how a forward is computed, HTTP, the session log.
"""
