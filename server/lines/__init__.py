"""Lines: sessions of conversations that a client does not name as sessions, but gives a hint of.

A coding agent sends its whole history with every request, and beside it an id of its own: a *hint*. Its *line* is the
session with the exact tokens of that conversation, which new messages are appended to. Which line a request continues
is decided by its messages alone.

Owns: recognising a conversation, agreeing on its front, its branches.

May import: ``server.turns`` and what that may.

Never knows: the shapes of any API's requests and replies.
"""
