"""Embeddings, reranking and scores: OpenAI's endpoint, and those of Jina, Cohere and vLLM.

Owns: their routes, request schemas, objects; tokenising inputs; the call of the engine.

May import: ``server.turns``, ``server.api.ops``.

Never knows: sessions, chats, other API families.
"""
