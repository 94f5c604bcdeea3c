"""Segments: files that hold the KV of a range of tokens, and the tree that they form.

Owns: file format, checksums, encoding, the tree.

May import: ``cache.whole_files``, ``cache.memory.codec``.

Never knows: pages, budgets, threads.
"""
