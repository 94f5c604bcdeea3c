"""Middleware: what every request passes before its route.

Owns: keys and hosts, request ids and access lines, CORS, refusing what a full queue would refuse.

May import: ``server.http``, ``server.telemetry``, ``server.engine``.

Never knows: endpoints, and what their bodies mean.
"""
