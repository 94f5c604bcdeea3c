"""GGUF files: the configuration, the tokenizer and the weights that one has, as transformers' model of its architecture
wants them.

Owns: which architectures are read, what their metadata and tensors are called, and in which order rows are stored.

May import: what ``scheduler.weights`` may, ``scheduler.gguf_pooling``, and its forms of packed weights.

Never knows: other checkpoints, how packed weights are multiplied, sessions, steps.
"""
