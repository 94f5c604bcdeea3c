"""Options: what an operator can set, and the command line made of it.

Owns: every option once, with its type, unit, default and help text; the parser of command lines and
environment.

May import: the standard library, pydantic and ``scheduler.protocol``.

Never knows: what an option does to a running server.
"""
