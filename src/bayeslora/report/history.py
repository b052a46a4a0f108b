"""Training history of a run: the likelihood, the KL terms and the validation metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bayeslora.figures.training import draw_history
from bayeslora.report.blocks import Drawing, Gallery, Plain

History = Sequence[Mapping[str, Any]]


def history_block(history: History) -> Gallery | Plain:
    """Training curves, or a table if there is only one point."""
    epochs = [int(record["epoch"]) for record in history]
    nll, terms, scores = _likelihood(history), _kl(history), _scores(history)
    if len(history) == 1:
        named = {f"{name} NLL": it for name, it in nll.items()} | {
            f"weight × KL, {name}": it for name, it in terms.items()
        }
        named |= {f"validation {name} in %": it for name, it in scores.items()}
        rows = [[name, f"{values[0]:.4f}"] for name, values in named.items()]
        return Plain("history", ["", "at the end"], rows, "The only evaluation during training.", frozenset({1}))
    drawings = [
        Drawing(
            "training-nll",
            draw_history(epochs, nll, "NLL in nats"),
            "Mean NLL of the training examples of an epoch, and of the validation split after it.",
            f"NLL over {len(epochs)} evaluations: {_ends(nll)}.",
        )
    ]
    if terms:
        drawings.append(
            Drawing(
                "training-kl",
                draw_history(epochs, terms, "weight × KL in nats"),
                "KL to the prior, each term times its weight in the objective: what is added to the NLL.",
                f"Weighted KL terms: {_ends(terms)}.",
            )
        )
    drawings.append(
        Drawing(
            "training-validation",
            draw_history(epochs, scores, "in %"),
            "Accuracy and calibration error on the validation split.",
            f"On the validation split, in per cent: {_ends(scores)}.",
        )
    )
    return Gallery(drawings)


def _likelihood(history: History) -> dict[str, list[float]]:
    return {
        "training": [float(record["train_nll"]) for record in history],
        "validation": [float(record["validation"]["nll"]) for record in history],
    }


def _kl(history: History) -> dict[str, list[float]]:
    """The KL terms of the method, if the run recorded them (older versions did not)."""
    if not all("kl" in record for record in history):
        return {}
    return {
        name: [float(record["kl"]["weight"]) * float(record["kl"][name]) for record in history]
        for name in history[0]["kl"]
        if name != "weight" and any(record["kl"][name] for record in history)
    }


def _scores(history: History) -> dict[str, list[float]]:
    return {name.upper(): [100 * float(record["validation"][name]) for record in history] for name in ("acc", "ece")}


def _ends(curves: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{name} from {values[0]:.4g} to {values[-1]:.4g}" for name, values in curves.items())
