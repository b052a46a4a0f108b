"""What can go wrong in training through nobody's mistake."""


class TrainingDiverged(RuntimeError):
    """The loss is no longer a finite number; the message says where."""


class RunsFailed(RuntimeError):
    """Some of many runs failed, and the others went on."""
