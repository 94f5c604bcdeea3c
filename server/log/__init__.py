"""The session log: who a session is, and exactly which tokens and messages it holds.

Owns: tables, rows, timelines, leases among servers, stored responses, the data directory;
``recovery`` for damaged files.

May import: ``server.config``, ``server.errors``.

Never knows: HTTP, templates, engines, KV caches.
"""
