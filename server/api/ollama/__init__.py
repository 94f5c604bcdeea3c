"""Ollama's API; requests are translated to chats and completions.

Owns: routes, shapes, the writers of replies.

May import: ``server.turns``, ``server.api.openai``, ``server.api.embeddings``, ``server.api.ops``.

Never knows: sessions over REST, responses, Anthropic's API.
"""
