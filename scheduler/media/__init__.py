"""Pictures in prompts: the model's own processor, its encoder, and how what that makes enters a step.

Owns: ``Processor``, ``Sight``, ``MediaStore``.

May import: ``cache``, ``scheduler.protocol``, ``scheduler.model_facts``.

Never knows: turns, modes, sockets.
"""
