"""The modes: how a model's forward runs over one step of many sessions.

Owns: watching a model once, the modes (packed, masked, alone), recurrent modules, RoPE thresholds, encoder-decoders.

May import: ``cache``, ``scheduler.accel``.

Never knows: turns, sampling, which mode is right: ``scheduler.model`` measures that.
"""
