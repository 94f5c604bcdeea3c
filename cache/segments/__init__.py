"""Segments: files that hold the KV of a range of tokens, and the tree that they form.

Owns: file format, checksums, codecs, the tree.

May import: ``cache.files``.

Never knows: memory, budgets, threads.
"""
