"""`warmturn doctor`.

Owns: checks of the machine, a model, storage, and how they are shown.

May import: everything.

Never knows: how what it finds is mended: it says what to do.
"""
