"""Telemetry: metrics, traces and log lines of the server.

Owns: metrics, traces, log lines.

May import: ``server.log``, ``server.schemas``.

Never knows: routes and turns, which report to it.
"""
