"""Segments: files with the KV of one token range, and the tree they form.

Owns: file format, checksums, codecs, the tree.

May import: ``cache.files``.

Never knows: memory, budgets, threads.
"""
