"""The KV cache: layer kinds, pages, prefix cache, segments, tiers. Imports neither ``scheduler`` nor ``server``."""
