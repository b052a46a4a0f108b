"""The LoRAs that a run starts from: which ones it needs, and whether the given ones fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME

from bayeslora.errors import InputError
from bayeslora.methods import find_method
from bayeslora.runs.config import PredictionConfig, RunConfig, resolve
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.saved_config import differences, to_dict

SEED_DISTANCE = 1000
"""Distance between the seeds of an ensemble's members, so that runs of neighbouring seeds share none."""


def lora_runs(config: RunConfig) -> list[RunConfig]:
    """The LoRA runs that a post-hoc method needs, resolved. The first has the run's own seed, whatever the method."""
    method = find_method(config.method)
    count = method.loras(config.adapter.settings) if method.fit_post_hoc is not None else 0
    lora = replace(
        config,
        method="lora",
        start_from=(),
        adapter=replace(config.adapter, posterior=None, settings={}),
        prediction=PredictionConfig(
            batch_tokens=config.prediction.batch_tokens, solutions=0, calibrate="none", unfamiliar_by="none"
        ),
    )
    return [resolve(replace(lora, seed=config.seed + SEED_DISTANCE * k)) for k in range(count)]


def require_origins(config: RunConfig, directory: Path) -> list[str]:
    """Adapter directories of the given LoRAs; refused where their number or training does not fit.

    Paths are relative to the working directory or, in a study, to that of the run.
    """
    method = find_method(config.method)
    if method.foreign() is not None:
        raise InputError(
            f"method {method.name!r} is an adapter of PEFT's own and starts from no LoRA; leave start_from out"
        )
    wanted = method.loras(config.adapter.settings) if method.fit_post_hoc is not None else 1
    if len(config.start_from) != wanted:
        raise InputError(
            f"start_from names {len(config.start_from)} LoRAs, but method {method.name!r} stands on {wanted}; give as many"
        )
    runs = lora_runs(config)
    paths = [
        directory / it if not Path(it).exists() and (directory / it).exists() else Path(it) for it in config.start_from
    ]
    return [str(_adapter(path, to_dict(runs[0]) if runs else None)) for path in paths]


def _adapter(path: Path, wanted: Mapping[str, Any] | None) -> Path:
    """The adapter of a run, or the directory itself if it is one; a run must have the settings ``wanted``."""
    if (path / CONFIG_NAME).exists():
        return path
    directory = RunDirectory(path)
    if not directory.result.exists() or not (directory.adapter / CONFIG_NAME).exists():
        raise InputError(
            f"{path}: is neither a finished run nor a directory with an {CONFIG_NAME}; give one to start from"
        )
    found = directory.read_config()
    if found.get("method") != "lora":
        raise InputError(f"{path}: is a run of method {found.get('method')!r}; give one of method 'lora'")
    own = {  # any seed will do, a LoRA predicts without draws, and its evaluation does not matter
        name: found.get(name) for name in ("seed", "prediction", "report_split")
    }
    lines = [] if wanted is None else differences({**wanted, **own}, found)
    if lines:
        raise InputError(f"{path}: was trained otherwise than this run says ({'; '.join(lines[:3])}); give the same")
    return directory.adapter
