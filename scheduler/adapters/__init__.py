"""Adapters: low-rank additions to a model's weights (LoRA), of which each row of a step may have another.

Owns: reading peft's checkpoints, fitting them to a model, and adding them to its linear modules.

May import: ``cache``, ``scheduler.accel.cpu``, ``scheduler.weights``.

Never knows: turns, modes, sockets.
"""
