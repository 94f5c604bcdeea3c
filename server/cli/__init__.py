"""Commands that are clients of a server or examine one: chat, sessions, bench, doctor.

Owns: terminal input and output.

May import: everything.

Never knows: nothing imports it but ``server.__main__``.
"""
