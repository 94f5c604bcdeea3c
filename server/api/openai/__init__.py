"""OpenAI's chat completions, completions and models.

Owns: their routes.

May import: ``server.turns``, ``server.api.ops``.

Never knows: sessions over REST, responses, Anthropic's API.
"""
