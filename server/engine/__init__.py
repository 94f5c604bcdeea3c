"""The engine as the server process sees it.

Owns: the engine process and its socket, the mailbox of each running turn, questions about the KV of
sessions.

May import: ``server.errors``, ``scheduler.protocol``.

Never knows: sessions' logs, templates, HTTP.
"""
