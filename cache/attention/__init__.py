"""Attention over pages: the function that modeling code calls, and its backends for CPUs and GPUs. A backend is
compared with a reference before it is used.

Owns: the attention function that modeling code calls, the backends of CPU and GPU, their self-test.

May import: ``cache.pages``, ``cache.memory``.

Never knows: when sessions begin and end, tiers below memory.
"""
