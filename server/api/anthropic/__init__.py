"""Anthropic's Messages API; requests are translated to chats.

Owns: routes, shapes, the writer of replies.

May import: ``server.turns``, ``server.api.openai``, ``server.api.ops``.

Never knows: sessions over REST, responses.
"""
