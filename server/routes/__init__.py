"""One module per resource; each has a ``router``."""
