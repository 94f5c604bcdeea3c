"""Layers compiled by ``torch.compile`` for GPUs.

Owns: which layers are compiled and when they are used.

May import: ``cache.attention``.

Never knows: turns, sessions.
"""
