"""Programs for CPUs: modules of the model are recorded once and then run by C++ kernels.

Owns: the recorder, basic blocks of instructions, packed weights and experts, layers and chains of layers in one call.
Other packages use ``linear.pack`` and ``Packing``, ``experts.pack_experts``, ``fusion.Fusion`` and
``program_kernel.kernel``; ``scheduler.accel.gpu`` also what finds linear modules and experts.

May import: ``cache.attention``, ``cache.pages``.

Never knows: turns, sessions, how a model is loaded.
"""
