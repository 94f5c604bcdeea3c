"""Constraints: grammars that a reply must match.

Owns: grammars of llguidance made from JSON schemas, regular expressions and choices, and which
schemas can be enforced.

May import: ``server.workers``.

Never knows: requests, HTTP, templates.
"""
