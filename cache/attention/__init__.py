"""Attention over pages: one definition, several kernels, each compared with it before it is used.

Owns: the attention function that modeling code calls, CPU and GPU kernels, their self-test.

May import: ``cache.pages``, ``cache.memory``.

Never knows: sessions' lives, tiers below memory.
"""
