"""Telemetry: what the server tells of itself.

Owns: metrics, traces, log lines.

May import: ``server.log``, ``server.schemas``.

Never knows: routes and turns, which report to it.
"""
