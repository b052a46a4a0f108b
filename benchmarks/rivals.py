"""The confidence of free answers held against the scores of uqlm and lm-polygraph, on the same generations.

python benchmarks/hidden_options.py DATA splits
bayeslora train --model MODEL --task splits --solutions 0 --calibrate none --out runs/bayesian-lora
bayeslora train --model MODEL --task splits --method lora --solutions 0 --calibrate none --out runs/lora
python benchmarks/rivals.py generate runs/bayesian-lora --draws 4 8 --samples 8 --out bayesian-lora.json
python benchmarks/rivals.py generate runs/lora --samples 8 --out lora.json
python benchmarks/rivals.py score bayesian-lora.json lora.json --out result.json --table table.md

`generate` answers the validation and test questions of the run's task and keeps all that scores are computed from. The answer
is decoded greedily, from the average of the draws where there are some. Sampled answers have temperature 1; of a distribution
over weights each comes from a draw of its own. `score` needs no model. A confidence is fitted to each score on the validation
questions in the same way (Platt scaling), and the metrics are of the test questions. With `--packages` the packages' own
functions are used where they can be imported, in place of the formulas.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from records import command
from rival_answers import SPLITS, generate_all
from rival_packages import find_packages
from rival_scores import SCORES, UNSTEMMED, Answered, Score

from bayeslora import metrics
from bayeslora.errors import InputError
from bayeslora.predict.calibrate.confidence import fit_confidence
from bayeslora.predict.generation.confidence import FEATURES
from bayeslora.report.reading import checking, read_record
from bayeslora.runs.free_answers import answer_metrics, calibrate_answers, with_confidence

FEWEST = 5
"""Right and wrong answers below which no interval is computed."""


@dataclass(frozen=True)
class Answers:
    """The answers of a model, as ``generate`` wrote them."""

    record: Mapping[str, Any]

    @property
    def method(self) -> str:
        """How the model was trained."""
        return str(self.record["method"])

    @property
    def primary(self) -> int:
        """Draws behind the answers that rivals score."""
        return 0 if self.record["draws"] == [0] else int(self.record["samples"])

    def answered(self, split: str) -> list[Answered]:
        """What rivals score."""
        return [Answered.from_dict(row) for row in self.record["splits"][split]["answered"]]

    def ours(self, split: str, draws: int) -> list[dict[str, Any]]:
        """What our confidence is computed from."""
        return list(self.record["splits"][split]["ours"][str(draws)])

    def seconds(self, *stages: str) -> float:
        """Seconds per test question."""
        return float(sum(self.record["seconds"]["test"][stage] for stage in stages))


def read_answers(path: Path) -> Answers:
    """Read what ``generate`` wrote."""
    found = Answers(read_record(path))
    with checking(path):
        for split in SPLITS:
            found.answered(split), found.ours(split, found.primary)
    return found


def bounded(values: Sequence[float]) -> NDArray[np.float64]:
    """Scores as finite numbers: those of impossible answers are infinite. One that is no number is refused."""
    scores = np.asarray(values, dtype=np.float64)
    if np.isnan(scores).any():
        raise InputError(f"a score is no number for {int(np.isnan(scores).sum())} of {len(scores)} answers")
    return np.clip(scores, -1e6, 1e6)


def two_classes(confidence: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities ``[N, 2]`` that answers are wrong and right."""
    return np.stack([1.0 - confidence, confidence], axis=1)


def ranks(probabilities: NDArray[Any], right: NDArray[Any]) -> float:
    """AUROC of the probability to be right."""
    return metrics.auroc(probabilities[:, 1], right)


def figures(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> dict[str, Any]:
    """Metrics of a calibrated confidence."""
    records = [{"right": r, "confidence": c, "f1": 0.0} for c, r in zip(confidence, right, strict=True)]
    found = answer_metrics(records)
    kept: dict[str, Any] = {name: found.get(name) for name in ("acc", "auroc", "aurc", "ece", "brier")}
    return kept


def our_rows(answers: Answers) -> list[dict[str, Any]]:
    """Our calibrated confidence for every number of draws."""
    made = []
    for draws in answers.record["draws"]:
        held, test = (answers.ours(split, draws) for split in SPLITS)
        after = with_confidence(test, calibrate_answers(held))
        right = np.array([row["right"] for row in test], dtype=bool)
        confidence = np.array([row["confidence"] for row in after])
        made.append(
            {
                "score": f"confidence, {draws} draws" if draws else "confidence, one network",
                "package": "bayeslora",
                "source": "package",
                "model": answers.method,
                "draws": draws,
                "sequences": 2 * max(1, draws),
                "seconds": answers.seconds(f"answers {draws}", f"agreement {draws}"),
                **figures(confidence, right),
                "raw_ece": metrics.ece_from_confidence([row["confidence"] for row in test], right),
                "note": f"{len(FEATURES)} features, logistic regression",
                "confidences": confidence.round(6).tolist(),
            }
        )
    return made


Scored = dict[str, NDArray[np.float64]]
"""Values of a score for the answers of each split."""


def rival_rows(answers: Answers, packages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All scores of the packages, and those of each package together."""
    given = {split: answers.answered(split) for split in SPLITS}
    found: dict[str, Scored] = {}
    made = []
    for score in SCORES:
        use = packages.get(score.key)
        begun = time.perf_counter()
        found[score.key] = {
            split: bounded(use(rows) if use else [score.score(row) for row in rows]) for split, rows in given.items()
        }
        own = (time.perf_counter() - begun) / sum(map(len, given.values()))
        note = "" if use and score.note == UNSTEMMED else score.note  # the package does stem them
        source = packages["versions"][score.package] if use else "formula"
        row = {"score": score.name, "package": score.package, "source": source, "note": note}
        made.append(row | cost(answers, [score], own) | judged(given, [found[score.key]], score.probability))
    for package in dict.fromkeys(score.package for score in SCORES):
        mine = [score for score in SCORES if score.package == package]
        row = {"score": "all of these, weighted", "package": package, "source": "our logistic regression", "note": ""}
        made.append(row | cost(answers, mine, 0.0) | judged(given, [found[score.key] for score in mine], False))
    return made


def cost(answers: Answers, scores: Sequence[Score], own: float) -> dict[str, Any]:
    """Sequences and seconds per answer, with those of the generations that the scores need."""
    stages, sequences = [f"answers {answers.primary}"], max(1, answers.primary)
    if any(score.samples for score in scores):
        stages, sequences = [*stages, "samples"], sequences + int(answers.record["samples"])
    if any(score.asks for score in scores):
        stages, sequences = [*stages, "asking"], sequences + 1
    return {"model": answers.method, "sequences": sequences, "seconds": answers.seconds(*stages) + own}


def judged(given: Mapping[str, Sequence[Answered]], values: Sequence[Scored], probability: bool) -> dict[str, Any]:
    """Metrics of a score, or of several together, after a confidence was fitted on the validation answers."""
    held, test = (np.stack([it[split] for it in values], axis=1) for split in SPLITS)
    known, right = (np.array([row.right for row in given[split]], dtype=bool) for split in SPLITS)
    fitted = fit_confidence([f"score {k}" for k in range(len(values))], held, known)
    confidence = fitted.apply(test)
    made = figures(confidence, right) | {"confidences": confidence.round(6).tolist()}
    if probability:
        made["raw_ece"] = metrics.ece_from_confidence(test[:, 0].clip(0.0, 1.0), right)
    return made


def add_intervals(answers: Answers, rows: Sequence[dict[str, Any]], resamples: int) -> None:
    """The interval of every AUROC and, on the same answers, by how much ours is higher."""
    rights = {row["draws"]: rights_of(answers, row["draws"]) for row in rows if "draws" in row}
    ours = next(row for row in rows if row.get("draws") == answers.primary)
    for row in rows:
        right = rights[row.get("draws", answers.primary)]
        if resamples == 0 or min(right.sum(), len(right) - right.sum()) < FEWEST:
            continue
        own, best = (two_classes(np.array(it["confidences"])) for it in (row, ours))
        interval = metrics.bootstrap_interval(ranks, own, right, resamples=resamples)
        row |= {"auroc_low": interval.low, "auroc_high": interval.high}
        if "draws" not in row:
            gain = metrics.paired_bootstrap(ranks, best, own, right, resamples=resamples)
            row["auroc_gain"] = {"value": gain.difference, "low": gain.low, "high": gain.high, "p": gain.p_value}


def rights_of(answers: Answers, draws: int) -> NDArray[np.int64]:
    """Which test answers are right, as 0 and 1."""
    return np.array([row["right"] for row in answers.ours("test", draws)], dtype=np.int64)


def standing(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each of our rows, the rivals that are at least as good, of all and of those that cost as much."""
    rivals = [row for row in rows if row["package"] != "bayeslora"]
    made = []
    for own in (row for row in rows if row["package"] == "bayeslora"):
        better = {
            "auroc": [row for row in rivals if (row["auroc"] or 0.0) >= (own["auroc"] or 0.0)],
            "ece": [row for row in rivals if row["ece"] <= own["ece"]],
        }
        made.append(
            {
                "score": own["score"],
                "model": own["model"],
                "rivals": len(rivals),
                **{
                    f"no_worse_in_{name}": [f"{row['package']}: {row['score']} ({row['model']})" for row in found]
                    for name, found in better.items()
                },
                **{
                    f"no_worse_in_{name}_at_most_our_sequences": sum(
                        row["sequences"] <= own["sequences"] for row in found
                    )
                    for name, found in better.items()
                },
            }
        )
    return made


def score_all(given: argparse.Namespace) -> None:
    """Score the answers of all models and write the table."""
    packages = find_packages() if given.packages else {}
    rows: list[dict[str, Any]] = []
    models = []
    for path in given.answers:
        answers = read_answers(path)
        found = [*our_rows(answers), *rival_rows(answers, packages)]
        add_intervals(answers, found, given.resamples)
        rows += found
        models.append({name: value for name, value in answers.record.items() if name != "splits"})
        models[-1]["questions"] = {split: len(answers.answered(split)) for split in SPLITS}
    for row in rows:
        del row["confidences"]
    record = {
        "schema": 1,
        "calibration": "logistic regression on the validation answers, for all rows",
        "packages": packages.get("versions", {}),
        "models": models,
        "rows": rows,
        "standing": standing(rows),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    table = make_table(rows)
    print(table)
    if given.table is not None:
        given.table.write_text(table + "\n", encoding="utf-8")


def make_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All rows in Markdown, of each model the best AUROC first."""
    heads = (
        "score",
        "of",
        "answers by",
        "sequences",
        "ms per answer",
        "AUROC",
        "AURC",
        "ECE",
        "ECE raw",
        "Brier",
        "computed by",
    )
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|" + "---:|" * 7 + "---|"]
    for row in sorted(rows, key=lambda it: (it["model"], -(it["auroc"] or 0.0))):
        name = f"**{row['score']}**" if row["package"] == "bayeslora" else row["score"]
        cells = [f"{name} ({row['note']})" if row["note"] else name, row["package"], row["model"]]
        cells += [str(row["sequences"]), f"{1000 * row['seconds']:.1f}", _ranged(row)]
        cells += [_number(row.get(name)) for name in ("aurc", "ece", "raw_ece", "brier")]
        lines.append("| " + " | ".join([*cells, row["source"]]) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _ranged(row: Mapping[str, Any]) -> str:
    between = f" [{row['auroc_low']:.3f}, {row['auroc_high']:.3f}]" if "auroc_low" in row else ""
    return _number(row["auroc"]) + between


def main() -> None:
    """Generate, or score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    writing = verbs.add_parser("generate", help="answer the questions with a run")
    writing.add_argument("run", type=Path)
    writing.add_argument("--task", default=None, help="by default the one that the run was trained on")
    writing.add_argument(
        "--draws", nargs="*", type=int, default=[], help="of our confidence; by default as many as samples"
    )
    writing.add_argument("--samples", type=int, default=8, help="sampled answers that rivals compare")
    writing.add_argument("--questions", type=int, default=None, help="of each split, the first ones; all by default")
    writing.add_argument("--max-new-tokens", type=int, default=32)
    writing.add_argument("--rows", type=int, default=64, help="sequences at a time")
    writing.add_argument("--seed", type=int, default=0, help="of draws and samples")
    writing.add_argument("--device", default="auto")
    writing.add_argument("--out", type=Path, required=True)
    writing.set_defaults(act=generate_all)
    scoring = verbs.add_parser("score", help="compute all scores of answers and compare them")
    scoring.add_argument("answers", type=Path, nargs="+")
    scoring.add_argument("--packages", action="store_true", help="use the packages where they can be imported")
    scoring.add_argument("--resamples", type=int, default=1000, help="of the questions for intervals; 0 for none")
    scoring.add_argument("--out", type=Path, required=True)
    scoring.add_argument("--table", type=Path, default=None)
    scoring.set_defaults(act=score_all)
    given = parser.parse_args()
    given.act(given)


if __name__ == "__main__":
    command(main)
