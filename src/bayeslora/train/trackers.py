"""Logging to experiment trackers (TensorBoard, Weights & Biases, MLflow, ...), through accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError, did_you_mean

Log = Callable[[Mapping[str, float], int], None]


@contextmanager
def tracking(names: Sequence[str], directory: Path, config: Mapping[str, Any]) -> Iterator[Log | None]:
    """Yield a function that logs figures to these trackers, or ``None`` if there are none.

    Args:
        names: trackers, by accelerate's names.
        directory: for those that write files.
        config: settings of the run, logged once.
    """
    if not names:
        yield None
        return
    from accelerate import Accelerator

    accelerator = Accelerator(log_with=list(names), project_dir=directory, cpu=True)
    accelerator.init_trackers("bayeslora", {name: _plain(value) for name, value in config.items()})
    try:
        yield lambda figures, step: accelerator.log(dict(figures), step=step)
    finally:
        # end_training() would also end the process group, which the run still needs
        for tracker in accelerator.trackers:
            tracker.finish()


def require_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that do not exist or are not installed."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = list(LOGGER_TYPE_TO_CLASS)
    installed = [kind.value for kind in get_available_trackers()]
    for name in names:
        if name not in known:
            raise InputError(f"unknown tracker {name!r}{did_you_mean(name, known)}; choose {', '.join(known)}")
        if name not in installed:
            raise InputError(f"tracker {name!r} is not installed; run: pip install {name}")


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool)) else str(value)
