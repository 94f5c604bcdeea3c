"""`warmturn connect`.

Owns: what each client's configuration looks like (`clients.json`), and how it is printed and written.

May import: everything.

Never knows: what a client sends.
"""
