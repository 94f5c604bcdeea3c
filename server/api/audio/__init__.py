"""Speech to text over HTTP: transcriptions and translations of sounds.

Owns: the form of such a request, its windows one after the other, the five formats of the answer.

May import: everything below ``server.turns``, ``server.models``, ``server.api.sessions``.

Never knows: sessions, turns, messages.
"""
