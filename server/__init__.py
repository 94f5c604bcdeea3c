"""The server process: HTTP, chat templates, tokenizer, session log and command line. Never imports torch."""

__version__ = "0.1.0"
