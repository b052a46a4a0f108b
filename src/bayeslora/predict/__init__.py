"""Prediction: scoring options with a shared prompt, and averaging over draws."""

from bayeslora.predict.mc import average_draws
from bayeslora.predict.questions.options import OptionScores, PackedBatch, pack, score_options

__all__ = ["OptionScores", "PackedBatch", "average_draws", "pack", "score_options"]
