"""Tiers below memory: disk and remote storage of sessions' KV.

Owns: writing behind, loading, budgets, export and import, background threads.

May import: ``cache.pages``, ``cache.segments``, ``cache.memory``.

Never knows: turns, scheduling.
"""
