"""Speech to text: models that read a sound with an encoder and write down what is said with a decoder.

Owns: ``Recogniser``, ``SpeechCore``, loading and measuring such a model, and its serving loop.

May import: ``scheduler.model``, ``scheduler.protocol``, ``scheduler.model_facts``.

Never knows: sessions, pages, turns, HTTP.
"""
