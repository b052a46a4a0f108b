"""Predictions of many questions: their distributions, their metrics, and their file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bayeslora import metrics
from bayeslora.atomic_files import replacing
from bayeslora.data_frames import make_frame, said_metrics
from bayeslora.errors import InputError
from bayeslora.metrics import ReliabilityBins
from bayeslora.predict.mc import average_draws, keep_possible
from bayeslora.predict.questions.tie_breaking import choose_options
from bayeslora.tasks import Item, Scoring, continuations, distance_to_truth, require_gold, truth_entropy
from bayeslora.tasks.sources import parse_object, read_lines

if TYPE_CHECKING:
    from pandas import DataFrame

    from bayeslora.predict.calibrate import Calibration
    from bayeslora.predict.questions.scorer import DrawScores

INTERVALS = {"acc": metrics.accuracy, "nll": metrics.nll, "ece": metrics.ece, "brier": metrics.brier}
"""Metrics that get a bootstrap interval."""

DISTANCE = "feature_distance"
"""Name of a question's distance from the training questions in files and tables."""

LONGEST_QUESTION = 1000
"""Characters that are kept of a question with a wrong answer, from its end."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of ``N`` questions.

    Attributes:
        items: the questions.
        probabilities: ``[N, O]``, averaged over the draws; 0 only where a question has no such option.
        choices: ``[N]``, the chosen options.
        draws: ``[n, N, O]``, the distributions before averaging.
        distances: ``[N]``, how far the questions' features are from those of training, if that was fitted.
    """

    items: tuple[Item, ...]
    probabilities: NDArray[np.float64]
    choices: NDArray[np.int64]
    draws: NDArray[np.float64] | None = None
    distances: NDArray[np.float64] | None = None

    @classmethod
    def from_scores(
        cls, items: Sequence[Item], scores: DrawScores, calibration: Calibration, scoring: Scoring
    ) -> Predictions:
        """Calibrated predictions from scores under every draw; ``scoring`` says what was scored, for breaking ties."""
        predictive = calibration.apply(scores.predictive)
        totals = average_draws(scores.totals).numpy()
        choices = choose_options(predictive, totals, [continuations(item, scoring) for item in items])
        draws = scores.log_probabilities.exp().numpy()
        return cls(tuple(items), keep_possible(np.exp(predictive), predictive), np.array(choices), draws)

    def metrics(self) -> dict[str, float]:
        """All metrics as fractions (NLL and entropies in nats); the questions must have answers."""
        gold = np.array(require_gold(self.items))
        p = self.probabilities
        correct = self.choices == gold
        confidence = p.max(axis=1)
        figures = {
            "acc": float(correct.mean()),
            "nll": metrics.nll(p, gold),
            "ece": metrics.ece(p, gold),
            "brier": metrics.brier(p, gold),
            "adaptive_ece": metrics.adaptive_ece(p, gold),
            "classwise_ece": metrics.classwise_ece(p, gold, present=self.present),
            "mce": metrics.reliability_bins(p, gold).mce,
            "aurc": metrics.aurc(confidence, correct),
            "confidence": float(confidence.mean()),
            "entropy": float(self.entropies.mean()),
        }
        if self.epistemic is not None:
            figures["epistemic"] = float(self.epistemic.mean())
        if all(item.probabilities is not None for item in self.items):
            figures["distance_to_truth"] = distance_to_truth(p.tolist(), self.items)
            figures["truth_entropy"] = truth_entropy(self.items)
        return figures

    def __repr__(self) -> str:
        parts = [f"{len(self.items)} questions", f"mean confidence {self.probabilities.max(axis=1).mean():.3f}"]
        if self.draws is not None:
            parts.insert(1, f"{len(self.draws)} draws")
        if all(item.gold is not None for item in self.items):
            parts.append(said_metrics(main_metrics(self.metrics())))
        return f"Predictions({', '.join(parts)})"

    def to_pandas(self) -> DataFrame:
        """A table with one row per question: its ``id``, the ``choice`` and its ``confidence``, the ``entropy`` and its
        ``epistemic`` part in nats, the ``feature_distance`` if there is one, the ``probabilities`` of the options and, if the
        answer is known, ``gold`` and ``correct``."""
        return make_frame(self._rows())

    def _rows(self) -> Iterator[dict[str, Any]]:
        for row, item in enumerate(self.items):
            choice, options = int(self.choices[row]), [option.strip() for option in item.options]
            probabilities = self.probabilities[row, : len(options)]
            cells = {
                "id": item.id,
                "choice": options[choice],
                "confidence": float(probabilities.max()),
                "entropy": float(self.entropies[row]),
                **self._scores(row),
            }
            if item.gold is not None:
                cells |= {"gold": options[item.gold], "correct": choice == item.gold}
            yield {**cells, "probabilities": probabilities.tolist()}

    def reliability(self) -> ReliabilityBins:
        """Accuracy by confidence, whose ``ece`` is that of :meth:`metrics`."""
        return metrics.reliability_bins(self.probabilities, require_gold(self.items))

    def intervals(self) -> dict[str, dict[str, float]]:
        """95 % bootstrap intervals of the main metrics."""
        gold = np.array(require_gold(self.items))
        chosen = np.eye(self.probabilities.shape[1])[self.choices]  # ties were broken
        return {
            name: asdict(metrics.bootstrap_interval(metric, chosen if name == "acc" else self.probabilities, gold))
            for name, metric in INTERVALS.items()
        }

    @cached_property
    def entropies(self) -> NDArray[np.float64]:
        """``[N]``, entropy of every question's prediction, in nats."""
        return np.asarray(metrics.entropy(self.probabilities))

    @cached_property
    def epistemic(self) -> NDArray[np.float64] | None:
        """``[N]``, epistemic part of every question's entropy, the disagreement between draws.

        A temperature changes the entropy of the average; the parts keep their shares of it.
        """
        if self.draws is None:
            return None
        split = metrics.entropy_split(self.draws)
        share = np.divide(split.epistemic, split.total, out=np.zeros_like(split.total), where=split.total > 0)
        return np.asarray(share * self.entropies)

    def _scores(self, row: int) -> dict[str, float]:
        """What there is of a question beside its probabilities."""
        scores = {"epistemic": self.epistemic, DISTANCE: self.distances}
        return {name: float(values[row]) for name, values in scores.items() if values is not None}

    @property
    def present(self) -> NDArray[np.bool_]:
        """``[N, O]``, which options exist."""
        counts = np.array([[len(item.options)] for item in self.items])
        return np.arange(self.probabilities.shape[1]) < counts

    def write(self, path: Path) -> None:
        """Write one JSON line per question, compressed; the same predictions give the same bytes."""
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in self._records())
        with replacing(path) as partial:
            partial.write_bytes(gzip.compress(lines.encode(), mtime=0))

    def _records(self) -> Iterator[dict[str, Any]]:
        """The record of each question: all that the metrics need, and the text of those with a wrong answer."""
        for row, item in enumerate(self.items):
            record = {
                "id": item.id,
                "probabilities": self.probabilities[row, : len(item.options)].tolist(),
                "choice": int(self.choices[row]),
                "gold": item.gold,
                **self._scores(row),
            }
            if item.probabilities is not None:
                record["truth"] = list(item.probabilities)
            if item.gold is not None and record["choice"] != item.gold:
                record["question"] = item.prompt.text[-LONGEST_QUESTION:]
                record["options"] = [option.strip() for option in item.options]
            yield record


def read_predictions(path: Path) -> tuple[list[str], NDArray[np.float64], NDArray[np.int64]]:
    """Ids, probabilities ``[N, O]`` and right answers of a file of predictions, from which any metric can be recomputed."""
    with _reading(path) as records:
        ids = [record["id"] for record in records]
        rows: Sequence[Sequence[float]] = [record["probabilities"] for record in records]
        gold = np.array([record["gold"] for record in records], dtype=np.int64)
        probabilities = np.zeros((len(rows), max(map(len, rows), default=0)))
        for row, values in zip(probabilities, rows, strict=True):
            row[: len(values)] = values
    return ids, probabilities, gold


def read_option_counts(path: Path) -> NDArray[np.int64]:
    """How many options ``[N]`` every question in a file of predictions has."""
    with _reading(path) as records:
        return np.array([len(record["probabilities"]) for record in records], dtype=np.int64)


def read_epistemic(path: Path) -> NDArray[np.float64]:
    """Epistemic uncertainty ``[N]`` of every question in a file of predictions; 0 where there was one draw only."""
    with _reading(path) as records:
        return np.array([record["epistemic"] for record in records], dtype=np.float64)


def read_distances(path: Path) -> NDArray[np.float64] | None:
    """Distances ``[N]`` from the training questions in a file of predictions; ``None`` if it has none."""
    with _reading(path) as records:
        found = [record[DISTANCE] for record in records if DISTANCE in record]
        return np.array(found, dtype=np.float64) if len(found) == len(records) else None


def read_scores(path: Path) -> dict[str, NDArray[np.float64]]:
    """Scores ``[N]`` of the questions in a file of predictions, by name, as
    :func:`bayeslora.predict.questions.familiarity.uncertainty_scores` has them."""
    _, probabilities, _ = read_predictions(path)
    scores = {"distance": read_distances(path), "entropy": np.asarray(metrics.entropy(probabilities))}
    with _reading(path) as records:
        if all("epistemic" in record for record in records):
            scores["epistemic"] = np.array([record["epistemic"] for record in records], dtype=np.float64)
    return {name: values for name, values in scores.items() if values is not None}


def read_choices(path: Path) -> NDArray[np.int64]:
    """The chosen options ``[N]``, which the probabilities do not determine in case of ties."""
    with _reading(path) as records:
        return np.array([record["choice"] for record in records], dtype=np.int64)


def read_mistakes(path: Path) -> list[Mistake]:
    """Wrong answers in a file of predictions whose questions were kept, the most confident first."""
    with _reading(path) as records:
        found = [
            Mistake(
                record["question"],
                record["options"][record["choice"]],
                record["options"][record["gold"]],
                max(record["probabilities"]),
            )
            for record in records
            if "question" in record
        ]
    return sorted(found, key=lambda it: -it.confidence)


@dataclass(frozen=True)
class Mistake:
    """A question with a wrong answer."""

    question: str
    chosen: str
    right: str
    confidence: float


@contextmanager
def _reading(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Read the records of a file; errors name the file."""
    try:
        records = [parse_object(line, f"line {number}") for number, line in read_lines(path)]
        if not records:
            raise ValueError("it is empty")
        yield records
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is no complete file of predictions with answers ({error})") from error


def main_metrics(figures: Mapping[str, float]) -> dict[str, float]:
    """The three metrics reported during a run."""
    return {name: figures[name] for name in ("acc", "nll", "ece")}
