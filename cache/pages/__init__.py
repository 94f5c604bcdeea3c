"""Pages and session caches: what a session has cached, and where each token of a step is stored.

Owns: the page pool, session caches, the prefix index, eviction order, layer kinds, states, the packed cache that a
forward uses.

May import: ``cache.memory``, ``cache.segments``.

Never knows: how attention is computed, files, turns.
"""
