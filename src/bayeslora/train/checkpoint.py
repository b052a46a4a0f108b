"""The state of a training run in one safetensors file, written atomically.

Names of tensors say where they belong; counters and history are JSON in the file's header. All randomness is a function of
the seed and the step, so no generator states are saved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bayeslora.atomic_files import replacing, tensor_failures
from bayeslora.errors import InputError
from bayeslora.train.components import ComponentLosses

VERSION = 1


@dataclass
class TrainingState:
    """Progress of a run.

    Attributes:
        step: optimiser steps done.
        best_nll: least validation NLL so far.
        best: the parameters with that NLL, by name.
        waited: evaluations since then.
        stopped: whether training ended early.
        history: one record per evaluation.
        train_nll: sum over the questions of the current epoch, and their number.
        untrained_nll: training NLL of the first step, hence of the model as it was.
        components: sums like ``train_nll`` by component, where the posterior is a mixture.
        restarted: components that were replaced since the last evaluation.
        seconds: training time, over all attempts.
        step_seconds: the part of it spent in steps, without evaluations.
    """

    step: int = 0
    best_nll: float | None = None
    best: dict[str, Tensor] = field(default_factory=dict)
    waited: int = 0
    stopped: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    train_nll: tuple[float, int] = (0.0, 0)
    untrained_nll: float = math.inf
    components: ComponentLosses = field(default_factory=ComponentLosses)
    restarted: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    step_seconds: float = 0.0


def save_checkpoint(
    path: Path, state: TrainingState, parameters: Mapping[str, Tensor], optimiser: torch.optim.Optimizer, run: str
) -> None:
    """Write the state of a run: parameters, buffers and the rest; ``run`` identifies the run."""
    tensors = {f"parameter.{name}": parameter.detach() for name, parameter in parameters.items()}
    tensors |= {f"best.{name}": value for name, value in state.best.items()}
    for name, parameter in parameters.items():
        for key, value in optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser.{key}.{name}"] = torch.as_tensor(value)
    counters = {key: value for key, value in asdict(_without_tensors(state)).items() if key != "best"}
    header = {"version": str(VERSION), "run": run, "state": json.dumps(counters)}
    with tensor_failures(path), replacing(path) as partial:
        save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, partial, metadata=header)


def load_checkpoint(
    path: Path, parameters: Mapping[str, Tensor], optimiser: torch.optim.Optimizer, run: str
) -> TrainingState:
    """Restore parameters and optimiser from a checkpoint; returns the rest of the state."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("version") != str(VERSION) or header.get("run") != run:
                raise InputError(f"{path}: is a checkpoint of another run or version; remove it, or use --force")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path}: cannot be read ({error}); remove it, or use --force to begin anew") from error
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"parameter.{name}"])
    _restore_optimiser(optimiser, parameters, tensors)
    counters = json.loads(header["state"])
    counters["train_nll"] = tuple(counters["train_nll"])
    counters["components"] = ComponentLosses(**counters.get("components", {}))  # earlier checkpoints have none
    state = TrainingState(**counters)
    state.best = {name.removeprefix("best."): value for name, value in tensors.items() if name.startswith("best.")}
    return state


def _restore_optimiser(
    optimiser: torch.optim.Optimizer, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    for name, value in tensors.items():
        if name.startswith("optimiser."):
            _, key, owner = name.split(".", 2)
            parameter = parameters[owner]
            optimiser.state[parameter][key] = value.to(parameter.device)


def _without_tensors(state: TrainingState) -> TrainingState:
    """A shallow copy without tensors, which ``asdict`` would copy."""
    return TrainingState(**{**vars(state), "best": {}})
