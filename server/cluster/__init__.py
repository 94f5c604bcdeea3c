"""`warmturn cluster`: servers as replicas on Ray Serve.

Owns: deployment, routing of sessions to replicas.

May import: everything but ``server.cli``.

Never knows: how one server works inside.
"""
