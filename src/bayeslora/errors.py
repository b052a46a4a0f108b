"""Errors that are the user's to mend. The command line prints them as one line and exits with 2."""


class InputError(ValueError):
    """Something given by the user cannot be used; the message says what, what is allowed and what to do."""
