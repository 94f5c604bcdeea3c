"""HTTP, templates, tokenising, OpenAI objects, identity and log, command line. Never imports torch."""

__version__ = "0.1.0"
