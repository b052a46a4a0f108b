"""Display names and explanations of metrics."""

from __future__ import annotations

from collections.abc import Mapping

from bayeslora.report.blocks import Fact, Plain

UNCERTAIN = "uncertain_"
COT = "cot_"

MEANINGS = {
    "acc": "share of right answers",
    "nll": "negative log-likelihood in nats: less is better",
    "ece": "expected calibration error, 15 bins of equal width: how far confidence is from accuracy",
    "brier": "squared distance of the probabilities from the truth",
    "adaptive_ece": "the same error in bins of equal mass",
    "classwise_ece": "the same error of every option's own probability",
    "mce": "the largest gap between confidence and accuracy in a bin",
    "aurc": "area under the risk-coverage curve: less is better",
    "confidence": "mean of the largest probability",
    "entropy": "mean entropy of the prediction, in nats",
    "epistemic": "the part of it that lies between the draws of the weights, in nats; little of it does not make an answer right",
    "distance_to_truth": "mean distance from the true probabilities, which this task knows",
    "truth_entropy": "entropy of the true probabilities: no model can expect a lower NLL",
    "answered": "share of problems with an answer in a box",
    "f1": "word overlap of free answers with the accepted ones",
    "auroc": "how well the confidence tells right answers from wrong ones: 0.5 means not at all",
    "acc_at_80": "accuracy of the most confident 80 %",
    "acc_at_50": "accuracy of the most confident half",
}


def metrics_table(metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]], caption: str) -> Plain:
    """Table with a row per metric."""
    if not intervals:
        rows = [[name, f"{value:.4f}", meaning(name)] for name, value in metrics.items()]
        return Plain("metrics", ["metric", "value", "meaning"], rows, caption, frozenset({1}))
    bounds = {name: f"{low:.4f} – {high:.4f}" for name, (low, high) in intervals.items()}
    rows = [[name, f"{value:.4f}", bounds.get(name, ""), meaning(name)] for name, value in metrics.items()]
    return Plain("metrics", ["metric", "value", "95 % interval", "meaning"], rows, caption, frozenset({1, 2}))


def meaning(name: str) -> str:
    """Explanation of a metric."""
    if name.startswith(UNCERTAIN):
        return f"{MEANINGS.get(name.removeprefix(UNCERTAIN), '')} (the 5 % of tokens that a LoRA is least sure of)"
    if name.startswith(COT):
        return f"{meaning(name.removeprefix(COT))} (tokens of the reference solutions)"
    return MEANINGS.get(name, "")


def card(title: str, name: str, metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> Fact:
    """A metric to be shown large; accuracy and calibration error in per cent."""
    percent = name.removeprefix(COT).removeprefix(UNCERTAIN) in ("acc", "ece", "answered")

    def shown(value: float) -> str:
        return f"{100 * value:.1f}" if percent else f"{value:.3f}"

    note = "95 %: {} – {}".format(*map(shown, intervals[name])) if name in intervals else ""
    return Fact(title, shown(metrics[name]) + (" %" if percent else ""), note)


def in_words(metrics: Mapping[str, float], what: str = "answers") -> str:
    """One plain sentence on the confidence."""
    return f"It says it is {metrics['confidence']:.0%} sure on average, and is right in {metrics['acc']:.0%} of the {what}."


SHOWN = 20
"""Greatest number of answers to list."""

LONGEST = 80
"""Greatest number of characters of an answer in a table."""


def short(text: object) -> str:
    """A text for a cell of a table: on one line, and cut where it is too long."""
    whole = "—" if text is None else " ".join(str(text).split())
    return whole if len(whole) <= LONGEST else f"{whole[: LONGEST - 1]}…"
