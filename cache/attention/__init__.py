"""Attention over pages: one definition, several backends, each compared with it before it is used.

Owns: the attention function that modeling code calls, the backends of CPU and GPU, their self-test.

May import: ``cache.pages``, ``cache.memory``.

Never knows: sessions' lives, tiers below memory.
"""
