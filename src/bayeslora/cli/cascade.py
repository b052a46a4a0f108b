"""The verb that lets two models share the questions."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bayeslora.cli.common import OfDraws, OtherDataOptions, quoted
from bayeslora.errors import InputError
from bayeslora.number_checks import check_number
from bayeslora.runs.location import require_directory
from bayeslora.tasks.registry import check_task_names
from bayeslora.wording import counted

if TYPE_CHECKING:
    from bayeslora.runs.cascade import CascadeResult, Second

KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Cascade(OfDraws, OtherDataOptions):
    """Let a run answer what it is sure of and a second model the rest, and report share, accuracy and time.

    Examples:
        bayeslora cascade small-run --second large-run
        bayeslora cascade run --url http://127.0.0.1:8000 --url-model NAME --task questions.jsonl --threshold 0.7
    """

    second: Path | None = None
    """Directory of a second run, which answers what the first one is not sure of."""
    url: str | None = None
    """Instead of it, a server with OpenAI's chat API; its key is read from OPENAI_API_KEY."""
    url_model: str | None = None
    """Name of the model there."""
    threshold: float | None = None
    """Confidence from which on the first model answers; by default that of bayeslora calibrate."""
    task: str | None = None
    """A task, or the path of your own questions with answers; by default the run's own task."""
    split: Literal["train", "validation", "test"] = "test"
    """Part of the task."""
    max_questions: int | None = None
    """Use the first questions of the split only."""

    def run(self) -> None:
        """Run the cascade, with the figures on stdout."""
        self._check()
        self.require_directory()
        if self.second is not None:
            require_directory(self.second)
        check_task_names([self.task])
        from bayeslora.runs.cascade import run_cascade
        from bayeslora.tasks import require_options

        with self.loaded(raw=False) as trained:
            threshold = trained.calibration.threshold if self.threshold is None else self.threshold
            if threshold is None:
                raise InputError(
                    f"{self.directory}: has no threshold; give --threshold, or first run "
                    f"bayeslora calibrate {quoted(self.directory)} --error-rate 0.1"
                )
            task = require_options(trained.find_task(self.task, self.data_dir, self.own_format(trained)))
            items = task.load(self.split).items[: self.max_questions]
            result = run_cascade(trained, items, self._second(), threshold)
        if self.json:
            print(json.dumps(result.to_dict()))
        else:
            _print(result)

    def _check(self) -> None:
        if (self.second is None) == (self.url is None):
            raise InputError("give one second model: --second RUN, or --url with --url-model")
        if (self.url is None) != (self.url_model is None):
            raise InputError("--url and --url-model belong together: give the server, and the model's name there")
        if self.threshold is not None:
            check_number("threshold", self.threshold, least=0, most=1)
        if self.max_questions is not None and self.max_questions < 1:
            raise InputError(f"max-questions is {self.max_questions}; give a whole number of at least 1")

    def _second(self) -> Second:
        if self.second is not None:
            from bayeslora.runs.cascade import second_run
            from bayeslora.runs.load import load_run

            return second_run(load_run(self.second, device=self.device, trust_remote_code=self.trust_remote_code))
        from bayeslora.remote.endpoint import Endpoint
        from bayeslora.remote.expert import Expert

        return Expert(Endpoint(str(self.url), os.environ.get(KEY_VARIABLE) or None), str(self.url_model))


def _print(result: CascadeResult) -> None:
    def said(accuracy: float | None) -> str:
        return "none" if accuracy is None else f"{accuracy:.3f}"

    print(
        f"{counted(result.questions, 'question')}; the first model answers if its confidence is at least {result.threshold:.3f}"
    )
    print(f"{'answered by the first':24}{result.answered:.1%}, accuracy {said(result.first_accuracy)}")
    print(f"{'passed on':24}{1 - result.answered:.1%}, accuracy {said(result.second_accuracy)}")
    print(f"{'accuracy of the whole':24}{result.accuracy:.3f}; the first alone {result.alone:.3f}")
    passed = "" if result.second_seconds is None else f", {result.second_seconds:.3g} s if passed on"
    print(f"{'time per question':24}{result.seconds:.3g} s: {result.first_seconds:.3g} s for the first{passed}")
