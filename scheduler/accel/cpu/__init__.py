"""Programs for CPUs: modules recorded once and run by our C++ kernels.

Owns: the recorder, instructions, packed weights, layers and chains of layers in one call.

May import: ``cache.attention``, ``cache.pages``.

Never knows: turns, sessions, how a model is loaded.
"""
