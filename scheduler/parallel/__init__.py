"""Tensor parallelism: the processes of other ranks and what crosses between them.

Owns: dividing a model, lines between ranks, pages whose heads lie in several processes.

May import: ``cache``, ``scheduler.forward``.

Never knows: turns, sampling, sessions' names.
"""
