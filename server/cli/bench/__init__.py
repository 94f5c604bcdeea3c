"""`warmturn bench`.

Owns: its load, its measurements and its report.

May import: everything.

Never knows: the server's inside: it measures over HTTP.
"""
