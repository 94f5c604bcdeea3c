"""Forwards on GPUs: layers compiled by ``torch.compile``, and weights that stay packed in the GPU's memory.

Owns: which layers are compiled and when they are used, how packed weights lie on a device, products with them.

May import: ``cache.attention``, ``scheduler.weights``, and of ``scheduler.accel.cpu`` what finds linear modules and
experts.

Never knows: turns, sessions.
"""
