"""The result of a run or of an evaluation: one dataclass, saved as ``result.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from bayeslora.atomic_files import write_json
from bayeslora.data_frames import make_frame, said_metrics
from bayeslora.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA = 1
"""Version of the format of ``result.json``."""

_DAMAGED, _ADVICE = "is not as bayeslora wrote it", "restore it, or run its command again with --force"

Metrics = Mapping[str, float]
Intervals = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunResult(Mapping[str, Any]):
    """Metrics of predictions, with everything needed to make them again.

    It is also a read-only mapping with the entries of ``result.json``: ``result["metrics"]`` is ``result.metrics``. Entries
    that are ``None`` are left out of the file.

    Attributes:
        schema: version of the format.
        config: the resolved run.
        environment: versions, device and commit.
        processes: number of processes that trained together.
        seed: of the run.
        task: that was evaluated, if it is not a result of training.
        run_state: fingerprint of the evaluated run's files, if it is not a result of training.
        split: that was evaluated.
        samples: weight draws of the evaluation.
        draw_layers: layers in which the draws of the evaluation differ.
        calibration: temperature and posterior scale in use during the evaluation.
        metrics: by name, as fractions and nats, of the run as trained.
        intervals: confidence intervals of some metrics.
        counts: questions, texts and tokens by split.
        timing: seconds and steps.
        memory: peak use in bytes.
        reference: directory of the LoRA whose entropies determine the uncertain tokens.
        parameters: trainable and total number.
        history: a record for each epoch.
        stopped_early: whether training stopped before its last epoch.
        predictions: file with the predictions.
        calibrated: the same after calibration: metrics, intervals, file and what was chosen.
        tokens: number of evaluated tokens.
        solutions: number of generated solutions or free answers.
        validation: metrics on the validation split, for text.
        found: values that a post-hoc fit found.
        shift: of an evaluation on another task, the AUROC of telling its questions from the run's own, by score.
        kind: of the task: questions, labels, answers, conversations, text or problems.
        title: name of the task without directories of the machine that trained; only an id of the hub has a slash.
        labels: of texts to classify.
    """

    schema: int = SCHEMA
    config: Mapping[str, Any]
    environment: Mapping[str, Any] | None = None
    processes: int | None = None
    seed: int = 0
    task: str | None = None
    run_state: str | None = None
    split: str = "test"
    samples: int | None = None
    draw_layers: str | None = None
    calibration: Mapping[str, Any] | None = None
    metrics: Metrics
    intervals: Intervals = field(default_factory=dict)
    counts: Mapping[str, Any] = field(default_factory=dict)
    timing: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, Any] | None = None
    reference: str | None = None
    parameters: Mapping[str, int] | None = None
    history: Sequence[Mapping[str, Any]] | None = None
    stopped_early: bool | None = None
    predictions: str | None = None
    calibrated: Mapping[str, Any] | None = None
    tokens: int | None = None
    solutions: int | None = None
    validation: Mapping[str, Any] | None = None
    found: Mapping[str, Any] | None = None
    shift: Mapping[str, float] | None = None
    kind: str | None = None
    title: str | None = None
    labels: Sequence[str] | None = None

    def __repr__(self) -> str:
        method, task = self.config.get("method", "?"), self.task or self.config.get("task", "?")
        parts = [said_metrics(self.metrics)]
        if self.calibrated is not None:
            parts.append(f"calibrated: {said_metrics(self.calibrated['metrics'])}")
        return f"RunResult({method} on {task}, seed {self.seed}, {self.split} split: {'; '.join(filter(None, parts))})"

    def to_pandas(self) -> DataFrame:
        """A table with one row per metric: its ``value``, the ``low`` and ``high`` end of its interval if it has one, and the
        value after calibration, ``calibrated``."""
        after = None if self.calibrated is None else self.calibrated["metrics"]
        rows = []
        for name, value in self.metrics.items():
            ends = self.intervals.get(name, {})
            row = {"value": value, "low": ends.get("low"), "high": ends.get("high")}
            rows.append(row if after is None else {**row, "calibrated": after.get(name)})
        return make_frame(rows, index=list(self.metrics))

    @classmethod
    def read(cls, values: Mapping[str, Any], path: Path) -> RunResult:
        """Check the content of a file; entries of later versions are ignored."""
        known = {name: value for name, value in values.items() if name in _KINDS}
        if missing := [name for name in ("config", "metrics") if name not in known]:
            raise InputError(f"{path}: {_DAMAGED} (it lacks {missing[0]!r}); {_ADVICE}")
        if isinstance(known.get("schema"), int) and known["schema"] > SCHEMA:
            raise InputError(f"{path}: was written by a later version (schema {known['schema']}); update bayeslora")
        for name, value in known.items():
            if not isinstance(value, _KINDS[name]):
                raise InputError(f"{path}: {_DAMAGED} ({name} is {value!r}); {_ADVICE}")
        return cls(**known)

    def write(self, path: Path) -> None:
        """Write to a file atomically."""
        write_json(path, dict(self))

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name) if name in _KINDS else None
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (it.name for it in fields(self) if getattr(self, it.name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _kinds(hint: Any) -> tuple[type, ...]:
    """Classes that a value of a field may have, without their parameters."""
    parts = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    return tuple(get_origin(part) or part for part in parts)


_KINDS = {name: _kinds(hint) for name, hint in get_type_hints(RunResult).items()}
