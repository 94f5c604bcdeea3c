"""Tensor parallelism: the processes of the other ranks, and the messages between ranks.

Owns: dividing a model, lines between ranks, pages whose heads lie in several processes.

May import: ``cache``, ``scheduler.forward``.

Never knows: turns, sampling, sessions' names.
"""
