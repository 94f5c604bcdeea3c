"""The KV of sessions: layer kinds, pages, tiers. Imports neither ``scheduler`` nor ``server``."""
