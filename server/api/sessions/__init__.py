"""Sessions over REST: create, list, inspect, fork, rewind, edit, export, import.

Owns: routes, shapes, capsules.

May import: ``server.turns``, ``server.api.openai``.

Never knows: responses, Anthropic's API.
"""
