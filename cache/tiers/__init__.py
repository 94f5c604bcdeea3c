"""Tiers below memory: the KV of sessions on disk and in remote storage.

Owns: writing behind, loading, budgets, export and import, background threads.

May import: ``cache.pages``, ``cache.segments``, ``cache.memory``.

Never knows: turns, scheduling.
"""
