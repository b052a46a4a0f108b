"""Export a run as ordinary LoRA adapters: draws that any engine can serve and that predict exactly as the run does."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

import bayeslora
from bayeslora.adapter import BayesLoraModel
from bayeslora.atomic_files import new_directory, tensor_failures
from bayeslora.errors import InputError
from bayeslora.export.engines import Service
from bayeslora.export.manifest import Manifest, Served
from bayeslora.models.context import context_length
from bayeslora.models.finite import require_finite_weights
from bayeslora.models.locate import BUILTINS, locate
from bayeslora.number_checks import check_seed
from bayeslora.runs.environment import PACKAGES
from bayeslora.runs.trained import TrainedModel


def export_run(trained: TrainedModel, samples: int, out: Path, *, seed: int | None = None) -> Path:
    """Write the posterior mean and draws of a run as ordinary LoRA adapters, with ``manifest.json``; returns the path.

    The draws equal those of local predictions with as many samples. On failure, ``out`` is left unchanged.

    Args:
        trained: the run, with the calibration to use.
        samples: number of draws; 0 for the posterior mean alone. Ensembles export every member once, whatever the number.
        out: an empty or new directory.
        seed: of the draws; the run's by default, which gives the draws of its predictions.
    """
    tuner = _checked(trained, samples)
    place = out.expanduser().absolute()
    seed = trained.config.seed if seed is None else seed
    check_seed(seed)
    count = tuner.holder.draw_count(samples) if samples > 0 else 0
    with new_directory(place) as whole:
        with tensor_failures(place):
            written = tuner.export_samples(count, whole, torch.Generator().manual_seed(seed))
        _manifest(trained, tuner, written, place, seed).write(whole)
    return place


def merge_run(trained: TrainedModel, out: Path) -> Path:
    """Write the base model with the posterior mean merged: an ordinary model, as fast as the base. Returns the path.

    The run's model is merged irreversibly. On failure, ``out`` is left unchanged.
    """
    if trained.config.loading.bits is not None:
        raise InputError("the run's base model is quantised and cannot be merged into; export its draws instead")
    place = out.expanduser().absolute()
    with new_directory(place) as whole, tensor_failures(place):
        try:
            merged: Any = trained.model.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise InputError(f"a run of {trained.config.method!r} cannot be merged: {error}") from error
        require_finite_weights(merged, trained.config.model)
        merged.save_pretrained(whole)
        trained.loaded.tokenizer.save_pretrained(whole)
    return place


def _checked(trained: TrainedModel, samples: int) -> BayesLoraModel:
    """Return the run's tuner; raise if ordinary adapters cannot make its predictions."""
    if samples < 0:
        raise InputError(f"samples is {samples}; give 0 for the posterior mean, or more")
    tuner = trained.model.base_model
    if not isinstance(tuner, BayesLoraModel):
        raise InputError(
            f"a run of {trained.config.method!r} cannot be exported: its adapter is one of PEFT's own, which no LoRA adapter "
            "is equal to; export a run of another method"
        )
    posterior = tuner.holder.posterior("default")
    if samples > 0 and posterior.linearised:
        raise InputError(
            f"a run of {trained.config.method!r} answers by the linearised model (predictive={posterior.config.predictive!r}), "
            "and its draws would answer otherwise; train with the setting predictive=draws, or export 0 samples: its mean"
        )
    return tuner


def _manifest(trained: TrainedModel, tuner: BayesLoraModel, written: list[Path], place: Path, seed: int) -> Manifest:
    config, calibration = trained.config, trained.calibration
    mean, *draws = (Served(path.name, path.name) for path in written)
    adapters = tuple(draws) or (mean,)
    service = _service(trained, tuner, adapters, written[-1], place)
    return Manifest(
        base_model=_base_model(trained),
        revision=config.loading.revision,
        method=config.method,
        adapters=adapters,
        mean=mean,
        rank=service.rank,
        adapts_head=service.adapts_head,
        scoring=config.data.scoring,
        max_tokens=config.data.max_tokens,
        context=context_length(trained.loaded.model),
        posterior_scale=tuner.posterior_scale,
        temperature=calibration.temperature,
        threshold=calibration.threshold,
        conformal=calibration.conformal,
        seed=seed,
        versions={"bayeslora": bayeslora.__version__, **{it: importlib.metadata.version(it) for it in PACKAGES}},
        commands=service.commands(),
        warnings=tuple(service.vllm_refusals() + service.doubts() + _differences(trained)),
    )


def _service(
    trained: TrainedModel, tuner: BayesLoraModel, adapters: tuple[Served, ...], example: Path, place: Path
) -> Service:
    """Description of the export for an engine; ``example`` is one of the adapters, which are all alike."""
    loading, model = trained.config.loading, trained.loaded.model
    config: Any = model.config
    return Service(
        model=str(_directory(trained) or trained.config.model),
        model_type=config.model_type,
        vocabulary=config.vocab_size,
        revision=loading.revision,
        dtype=str(model.dtype).removeprefix("torch."),
        own_code=bool(getattr(config, "auto_map", None)),
        adapters=[Served(it.name, str(place / it.path)) for it in adapters],
        rank=LoraConfig.from_pretrained(str(example)).r,
        adapts_head=any(name.rpartition(".")[2] == "lm_head" for name in tuner.holder.layer_names),
    )


def _directory(trained: TrainedModel) -> Path | None:
    """Directory of the base model, or ``None`` if it is on the hub."""
    directory = locate(trained.config.model, trained.config.loading.revision)
    return None if directory is None else directory.absolute()


def _base_model(trained: TrainedModel) -> str:
    """Name by which a client can load the tokenizer from any directory."""
    name = trained.config.model
    return name if name in BUILTINS else str(_directory(trained) or name)


def _differences(trained: TrainedModel) -> list[str]:
    """Reasons why a server's answers may differ from the run's."""
    bits, depth = trained.config.loading.bits, trained.draw_layers
    found = []
    if bits is not None:
        found.append(
            f"the run's base model was quantised to {bits} bits while loading, and the commands serve it as it is: "
            "probabilities will differ somewhat, and calibration may be off"
        )
    if depth != "all":
        found.append(
            f"the run's own predictions draw in some layers only (draw_layers is {depth!r}), and the exported adapters in all: "
            "probabilities will differ somewhat, and calibration may be off"
        )
    return found
