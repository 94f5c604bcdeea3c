"""Operations: health, metrics, tokenize.

Owns: their routes and shapes.

May import: ``server.turns``.

Never knows: other API families.
"""
