"""Recovery: opens a damaged log with everything that can still be read.

Owns: reading SQLite's pages and write-ahead log without SQLite, and writing what is sound into a
new log.

May import: ``server.log``.

Never knows: what a session means to the rest of the server.
"""
