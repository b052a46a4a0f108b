"""The log of a search: every trial is written when it is planned, and again when it has ended.

The next step depends on the log alone, so a killed search resumes as if it had not been interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bayeslora.atomic_files import write_json
from bayeslora.errors import InputError
from bayeslora.runs.saved_config import differences, from_dict, to_dict

SCHEMA = 1

BASELINE_RUN = "baseline"
"""Directory of LoRA's run, which may be there before the log."""


@dataclass(frozen=True)
class Trial:
    """One run of a search.

    Attributes:
        number: from 0 on.
        source: how it was chosen: by the ``sobol`` sequence or the ``model``.
        values: the searched settings.
        state: ``planned``, ``done`` or ``failed``.
        outcomes: outcomes on the validation split.
        failure: reason of the failure.
    """

    number: int
    source: Literal["sobol", "model"]
    values: Mapping[str, float]
    state: Literal["planned", "done", "failed"] = "planned"
    outcomes: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""

    def path(self, out: Path) -> Path:
        """The directory of its run."""
        return out / "runs" / f"trial-{self.number:03d}"


class Log:
    """The trials so far, in a file that is written atomically."""

    def __init__(self, path: Path, study: Mapping[str, Any], trials: Sequence[Trial] = ()) -> None:
        self.path = path
        self.study = dict(study)
        self.trials = list(trials)

    def plan(self, trials: Iterable[Trial]) -> None:
        """Add planned trials."""
        self.trials.extend(trials)
        self._write()

    def done(self, number: int, outcomes: Mapping[str, float]) -> None:
        """Record the outcomes of a finished trial."""
        self._end(replace(self.trials[number], state="done", outcomes=outcomes))

    def failed(self, number: int, failure: str) -> None:
        """Record the failure of a trial."""
        self._end(replace(self.trials[number], state="failed", failure=failure))

    @property
    def planned(self) -> list[Trial]:
        """Trials that have not ended."""
        return [trial for trial in self.trials if trial.state == "planned"]

    def _end(self, trial: Trial) -> None:
        self.trials[trial.number] = trial
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"schema": SCHEMA, "study": self.study, "trials": [asdict(it) for it in self.trials]})


def open_log(path: Path, study: Mapping[str, Any]) -> Log:
    """Open the log of a search, empty if there is none. The log of another search is refused, unless none of its trials began.

    If all trials failed, that says nothing about their settings, and they are planned again.
    """
    if not path.exists():
        own = (".lock", BASELINE_RUN, f"{path.name}.partial")
        strangers = (
            sorted(it.name for it in path.parent.iterdir() if it.name not in own) if path.parent.exists() else []
        )
        if strangers:
            raise InputError(
                f"{path.parent}: is not empty ({strangers[0]}, ...) and holds no search; choose another directory"
            )
        return Log(path, study)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        trials = [Trial(**trial) for trial in record["trials"]]
        lines = _differences(study, record["study"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: is no log of a search ({error}); restore it, or choose another directory") from error
    if lines and not any(trial.outcomes or trial.path(path.parent).exists() for trial in trials):
        return Log(path, study)
    if lines:
        raise InputError(f"{path.parent}: holds another search ({'; '.join(lines[:3])}); choose another directory")
    if not any(trial.outcomes for trial in trials):
        trials = [replace(trial, state="planned", failure="") for trial in trials]
    return Log(path, study, trials)


def _differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Settings that differ, except the number of trials and the batch size, which may change within a search."""
    saved = to_dict(from_dict(other["run"]))  # missing settings get their defaults
    own, theirs = ({name: it[name] for name in it if name not in ("run", "trials", "q")} for it in (mine, other))
    return [*differences(mine["run"], saved), *differences(own, theirs)]
