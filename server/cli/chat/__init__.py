"""`warmturn chat`.

Owns: a conversation in the terminal, and one message from a pipe.

May import: everything.

Never knows: how the server keeps a session.
"""
