"""Averaging over draws. Every prediction of the library goes through this one function."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def average_draws(log_probabilities: Tensor) -> Tensor:
    """Logarithm of the mean over draws (first dimension) of *probabilities*, never of logits.

    Averaged logits are a sharper predictor that ignores how far the draws disagree.
    """
    return torch.logsumexp(log_probabilities, dim=0) - math.log(log_probabilities.shape[0])
