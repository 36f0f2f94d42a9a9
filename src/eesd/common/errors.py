"""The exception for everything that the user can fix."""


class EESDError(Exception):
    """Bad input. The message is one sentence that says what is wrong and what to do."""
