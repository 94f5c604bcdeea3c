"""The engine's loop: which turns run, what each says next, when it ends.

Owns: admission, the queue, steps, sampling, constraints, stop decisions, text.

May import: ``scheduler.model``, ``cache``.

Never knows: how a forward is computed, HTTP, the session log.
"""
