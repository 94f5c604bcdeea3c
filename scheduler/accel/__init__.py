"""Faster ways to compute a model's forward. Each is compared with the model's own code before it is used.

Owns: nothing itself.

May import: ``cache``.

Never knows: turns and sessions.
"""
