"""The model: loading, the load-time probe, memory for KV, and running steps.

Owns: checkpoint loading, the load-time probe, memory for KV, CUDA graphs, the model runner.

May import: ``scheduler.forward``, ``scheduler.parallel``, ``scheduler.accel``, ``cache``.

Never knows: turns: it is given sessions and token ids.
"""
