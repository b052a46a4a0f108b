"""Training failures that are not errors of the user."""


class TrainingDiverged(RuntimeError):
    """The loss is no longer a finite number; the message says where."""


class RunsFailed(RuntimeError):
    """Some of several runs failed; the others continued."""
