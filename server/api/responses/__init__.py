"""OpenAI's Responses and Conversations APIs.

Owns: routes, shapes, events, responses in the background.

May import: ``server.turns``, ``server.api.sessions``.

Never knows: Anthropic's API.
"""
