"""Constraints: grammars that hold a reply to a form.

Owns: grammars of llguidance made from JSON schemas, regular expressions and choices, and which
schemas can be enforced.

May import: ``server.workers``.

Never knows: requests, HTTP, templates.
"""
