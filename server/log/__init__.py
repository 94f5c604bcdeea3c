"""The session log: the sessions, with their exact tokens and messages, in SQLite or PostgreSQL.

Owns: tables, rows, timelines, leases among servers, stored responses, the data directory;
``recovery`` for damaged files.

May import: ``server.config``, ``server.errors``, ``server.media``.

Never knows: HTTP, templates, engines, KV caches.
"""
