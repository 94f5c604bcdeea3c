"""``UsageError``: a fault of the command line or of the environment."""


class UsageError(Exception):
    """What was asked for on the command line or in the environment cannot be; one line for the user."""
