"""Commands that talk to a server or look at one: chat, sessions, bench, doctor.

Owns: terminal input and output.

May import: everything.

Never knows: nothing imports it but ``server.__main__``.
"""
