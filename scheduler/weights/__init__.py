"""Weights as checkpoints store them: readers of files, and packed weights in one form for all formats.

Owns: readers of GGUF files and of other packed checkpoints, the configuration and tokenizer that a GGUF file describes.

May import: nothing of ours but ``scheduler.model_names``, ``scheduler.gguf_reader`` and ``scheduler.gguf_pooling``.

Never knows: how packed weights are multiplied, sessions, steps.
"""
