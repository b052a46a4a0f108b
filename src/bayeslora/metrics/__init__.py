"""Metrics of predictions: scores, calibration, uncertainty, selective answers, sets, tokens, intervals, distances.

Pure functions of probabilities ``[N, C]`` and integer labels ``[N]``. Only numpy is needed; CPU
tensors of torch are accepted as arrays.

Example:
    >>> probs = [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2], [0.0, 0.4, 0.6]]
    >>> labels = [0, 1, 1, 2]
    >>> accuracy(probs, labels), round(nll(probs, labels), 4), round(ece(probs, labels), 4)
    (0.75, 0.5737, 0.35)
"""

from bayeslora.metrics.bootstrap import (
    Interval,
    Metric,
    PairedDifference,
    bootstrap_interval,
    bootstrap_interval_over_runs,
    paired_bootstrap,
    paired_bootstrap_over_runs,
)
from bayeslora.metrics.calibration import (
    ReliabilityBins,
    adaptive_ece,
    classwise_ece,
    ece,
    ece_from_confidence,
    reliability_bins,
    reliability_bins_from_confidence,
)
from bayeslora.metrics.conformal import conformal_sets, conformal_threshold, mean_set_size, set_coverage
from bayeslora.metrics.mahalanobis import FeatureGaussian, fit_gaussian
from bayeslora.metrics.scores import accuracy, brier, nll
from bayeslora.metrics.selective import (
    RiskCoverage,
    accuracy_at_coverage,
    aurc,
    auroc,
    confidence_auroc,
    risk_coverage,
    shift_auroc,
    threshold_for_coverage,
    threshold_for_risk,
)
from bayeslora.metrics.tokens import TokenScores, token_scores, top_entropy
from bayeslora.metrics.uncertainty import EntropySplit, entropy, entropy_split

__all__ = [
    "EntropySplit",
    "FeatureGaussian",
    "Interval",
    "Metric",
    "PairedDifference",
    "ReliabilityBins",
    "RiskCoverage",
    "TokenScores",
    "accuracy",
    "accuracy_at_coverage",
    "adaptive_ece",
    "aurc",
    "auroc",
    "bootstrap_interval",
    "bootstrap_interval_over_runs",
    "brier",
    "classwise_ece",
    "confidence_auroc",
    "conformal_sets",
    "conformal_threshold",
    "ece",
    "ece_from_confidence",
    "entropy",
    "entropy_split",
    "fit_gaussian",
    "mean_set_size",
    "nll",
    "paired_bootstrap",
    "paired_bootstrap_over_runs",
    "reliability_bins",
    "reliability_bins_from_confidence",
    "risk_coverage",
    "set_coverage",
    "shift_auroc",
    "threshold_for_coverage",
    "threshold_for_risk",
    "token_scores",
    "top_entropy",
]
