"""The directory of a run: its layout, and which run owns it.

======================  =====================================================
``config.json``         the run with everything filled in; written first
``checkpoint``          the state of training, until the run is finished
``lora-K/``             runs of the LoRAs that the method builds on, unless some were given
``adapter/``            the adapter, as PEFT saves it, with its calibration, its model card, and for questions
                        the features of training questions
``predictions.jsonl.gz``  probabilities and answers of the reported split, for questions
``calibrated.jsonl.gz``   the same after calibration
``tokens-SPLIT.safetensors``  scores of every token, for text and solutions
``solutions.jsonl``     solutions to problems, and whether they are right
``answers.jsonl``       free answers with their confidence, and whether they are right
``result.json``         written last: a run with a result is finished
======================  =====================================================
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from bayeslora.atomic_files import write_json
from bayeslora.errors import InputError
from bayeslora.runs.result import RunResult
from bayeslora.runs.saved_config import differences, saved_run, to_dict


@dataclass(frozen=True)
class RunDirectory:
    """Paths in the directory of a run."""

    path: Path

    @property
    def config(self) -> Path:
        """The run's settings."""
        return self.path / "config.json"

    @property
    def checkpoint(self) -> Path:
        """The state of training."""
        return self.path / "checkpoint.safetensors"

    @property
    def is_adapter(self) -> bool:
        """Whether it is the directory of an adapter alone, which no run of ours has written."""
        return (self.path / "adapter_config.json").exists()

    @property
    def adapter(self) -> Path:
        """The adapter, in PEFT's format."""
        return self.path if self.is_adapter else self.path / "adapter"

    @property
    def calibration(self) -> Path:
        """The calibration by training or ``bayeslora calibrate``."""
        return self.adapter / "calibration.json"

    @property
    def familiarity(self) -> Path:
        """Features of training questions, for the distance of others from them."""
        return self.adapter / "familiarity.safetensors"

    @property
    def predictions(self) -> Path:
        """Predictions on the reported split."""
        return self.path / "predictions.jsonl.gz"

    @property
    def calibrated(self) -> Path:
        """The same predictions after calibration."""
        return self.path / "calibrated.jsonl.gz"

    def tokens(self, split: str) -> Path:
        """Scores of the tokens of a split."""
        return self.path / f"tokens-{split}.safetensors"

    @property
    def solutions(self) -> Path:
        """Solutions to problems."""
        return self.path / "solutions.jsonl"

    @property
    def answers(self) -> Path:
        """Free answers with their confidence."""
        return self.path / "answers.jsonl"

    def lora(self, number: int) -> Path:
        """The run of one of the LoRAs that this run builds on, if none were given."""
        return self.path / f"lora-{number}"

    @property
    def result(self) -> Path:
        """The result."""
        return self.path / "result.json"

    def claim(self, config: Mapping[str, Any], *, force: bool = False) -> None:
        """Claim the directory for this run, or refuse if it belongs to another.

        Args:
            config: the resolved run.
            force: remove another run's files (and nothing else).
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if force:
            self._clear()
        else:
            self.require_free_or_same(config)
        if not self.config.exists():
            write_json(self.config, config)

    def require_free_or_same(self, config: Mapping[str, Any], *, replaceable: bool = True) -> None:
        """Refuse a directory with another run or with other files; nothing is written.

        Args:
            config: the resolved run.
            replaceable: whether the command has ``--force``, for the message.
        """
        if self.config.exists():
            self._require_same(config, replaceable=replaceable)
        elif strangers := self._strangers():
            forced = ", or use --force to write into it" if replaceable else ""
            raise InputError(
                f"{self.path}: is not empty ({strangers[0]}, ...) and holds no run; choose another directory{forced}"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against other processes inside the block. If it is made for that and nothing is written into it, it
        is removed again."""
        made = [place for place in (self.path, *self.path.parents) if not place.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise InputError(f"{self.path}: is a file, or below one; choose a directory") from error
        except OSError as error:
            raise InputError(f"{self.path}: cannot be made ({error.strerror}); choose another directory") from error
        file = self.path / ".lock"
        lock = FileLock(file)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise InputError(f"{self.path}: another process is at work here; wait for it") from None
        try:
            yield
        finally:
            with suppress(OSError):  # it is gone, another process has come, or a system that removes no open file
                if made and list(self.path.iterdir()) == [file]:
                    file.unlink()
                    for place in made:
                        place.rmdir()
            lock.release()

    def read_config(self) -> dict[str, Any]:
        """The resolved run (see :func:`saved_run`), or the raw content if it cannot be parsed as one."""
        saved = _read_json(self.config, "give a directory that bayeslora train has written")
        with suppress(InputError):
            return dict(to_dict(saved_run(saved)))
        return saved

    def read_result(self) -> RunResult:
        """The result of a finished run."""
        values = _read_json(self.result, "the run is not done; give the same command again to go on with it")
        return RunResult.read(values, self.result)

    def fingerprint(self) -> str:
        """Hash of what predictions depend on: the run's result, which changes with every training (or the adapter, if there is no
        run), its settings, its calibration, and its features of training questions if there are some."""
        digest = hashlib.sha256()
        weights = self.adapter / "adapter_model.safetensors"
        for path in (weights if self.is_adapter else self.result, self.config, self.calibration):
            digest.update(path.read_bytes() if path.exists() else b"")
            digest.update(b"|")
        if self.familiarity.exists():
            digest.update(self.familiarity.read_bytes())
        return digest.hexdigest()

    def _require_same(self, config: Mapping[str, Any], *, replaceable: bool) -> None:
        lines = differences(config, self.read_config())
        if lines:
            forced = ", or use --force to replace it" if replaceable else ""
            raise InputError(
                f"{self.path}: holds another run ({'; '.join(lines[:3])}); choose another directory{forced}"
            )

    def clear_evaluation(self) -> None:
        """Remove a result with its predictions, the result first, so that it never looks finished without them."""
        for path in self.evaluation_files():
            path.unlink()

    def evaluation_files(self) -> list[Path]:
        """A result and its predictions, as far as they are there; the result first."""
        files = (self.result, self.predictions, self.calibrated, self.solutions, self.answers)
        return [*(path for path in files if path.exists()), *self.path.glob("tokens-*.safetensors")]

    def _clear(self) -> None:
        """Remove the run's files, the result first, so that a run without its adapter never looks finished."""
        self.clear_evaluation()
        begun = [path for file in (self.solutions, self.answers) for path in self.path.glob(f"{file.name}.*")]
        for path in (self.checkpoint, *begun):
            path.unlink(missing_ok=True)
        for folder in (self.adapter, *self.path.glob("lora-[0-9]*")):
            shutil.rmtree(folder, ignore_errors=not folder.exists())
        self.config.unlink(missing_ok=True)

    def _strangers(self) -> list[str]:
        own = (".lock", f"{self.config.name}.partial")
        return sorted(path.name for path in self.path.iterdir() if path.name not in own)


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; {advice}") from None
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON ({error}); restore it, or train again with --force") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds no JSON object; restore it, or train again with --force")
    return values
