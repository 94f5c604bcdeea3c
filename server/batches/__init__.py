"""Batches: requests from a file that run when nobody waits, and the files that they are read from and written to.

Owns: files of tenants in the data dir, the state of batches, the task that runs their requests.

May import: ``server.log``, ``server.http``, ``server.middleware`` for keys, ``server.models``.

Never knows: what the endpoints do that its requests go to.
"""
