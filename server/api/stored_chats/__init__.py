"""Stored chats: what `store: true` kept.

Owns: their routes.

May import: ``server.turns``, ``server.api.openai``, ``server.api.sessions``.

Never knows: responses, Anthropic's API.
"""
