"""OpenAI's files and batches.

Owns: routes, request schemas, objects, the upload of a file.

May import: ``server.batches``, ``server.turns``, ``server.api.sessions``.

Never knows: how a request of a batch is answered.
"""
