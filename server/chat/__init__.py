"""Chat: converts messages to token ids, and generated text to messages.

Owns: tokenizer and chat template, prompts, continuations, a model's dialect of reasoning and tool
calls, reading replies.

May import: ``server.schemas``, ``server.constraints``, ``server.log``.

Never knows: HTTP, engines, who asks.
"""
