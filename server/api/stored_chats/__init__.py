"""Stored chats: chat completions that were created with ``store: true``.

Owns: their routes.

May import: ``server.turns``, ``server.api.openai``, ``server.api.sessions``.

Never knows: responses, Anthropic's API.
"""
