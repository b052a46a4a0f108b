"""What can go wrong in training through nobody's mistake."""


class TrainingDiverged(RuntimeError):
    """The loss is no longer a finite number; the message says where."""
