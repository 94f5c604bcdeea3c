"""Device and host memory for pages, and copies between them.

Owns: tiers of memory, pinned and huge pages, streams.

May import: torch.

Never knows: what a page holds.
"""
