"""Models that give one vector for a text: embeddings, and the scores of cross-encoders.

Owns: reading what sentence-transformers saves beside a model, pooling, padded steps, the engine loop of such models.

May import: ``scheduler.model`` and what that may, but its probe and runner.

Never knows: sessions, KV, sampling.
"""
