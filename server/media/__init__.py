"""Media: pictures and sounds in messages. What they are, where they come from, and whether they are sound.

Owns: ``Media``, fetching by URL, the limits, the worker process that decodes them.

May import: ``server.config``, ``server.errors``.

Never knows: sessions, prompts, models.
"""
