"""Adapters that no run has written: of transformers' or TRL's trainer with our mixin, or plain LoRAs of PEFT.

A run knows more than its adapter: the task, how questions are asked, the number of draws. Those are defaults here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from bayeslora.adapter.base_fingerprint import fingerprint_of_files
from bayeslora.adapter.config import BayesLoraConfig
from bayeslora.adapter.foreign import FOREIGN
from bayeslora.adapter.holder import find_holder
from bayeslora.adapter.loading import load_adapter
from bayeslora.adapter.lora import FINGERPRINT, start_from_lora
from bayeslora.errors import InputError, first_line
from bayeslora.hub_names import is_hub_id
from bayeslora.methods import find_method
from bayeslora.methods.registry import ALL
from bayeslora.models import LoadedModel
from bayeslora.models.failures import damaged_weights
from bayeslora.models.locate import BUILTINS
from bayeslora.runs.config import AdapterConfig, RunConfig
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.location import SETTINGS
from bayeslora.runs.result import RunResult
from bayeslora.runs.saved_config import from_dict, to_dict

PLAIN = "LORA"


def run_of_adapter(directory: RunDirectory, model: str | None = None) -> RunConfig:
    """Settings for an adapter that has none: what its ``adapter_config.json`` says, and defaults.

    ``model`` is the base model, if the adapter does not name it or it lies elsewhere.
    """
    values = read_object(directory.adapter / CONFIG_NAME)
    base = model or builtin_of(directory) or values.get("base_model_name_or_path")
    if not base:
        raise InputError(f"{directory.path}: does not name its base model; give it with --model")
    kind, posterior = values.get("peft_type"), values.get("posterior")
    method = _method_of(values)
    if method is None:
        raise InputError(
            f"{directory.path}: holds an adapter of kind {posterior or kind}, which cannot be used by itself"
        )
    targets = values.get("target_modules") or ()
    adapter = AdapterConfig(
        rank=int(values.get("r") or 8),
        alpha=float(values.get("lora_alpha") or 16),
        targets=tuple([targets] if isinstance(targets, str) else sorted(targets)) or ("q_proj",),
        posterior=None if kind == PLAIN else posterior,
    )
    run = RunConfig(model=str(base), task="", method=method, adapter=adapter)
    settings = directory.path / SETTINGS
    return _with_settings(run, read_object(settings), settings) if settings.exists() else run


def builtin_of(directory: RunDirectory) -> str | None:
    """The built-in model that an adapter was trained on, if it is installed; ``None`` for another model.

    An adapter records the name that its original has on the hub, where the weights are others: the fingerprint tells.
    """
    values = read_object(directory.adapter / CONFIG_NAME)
    name = values.get("base_model_name_or_path")
    for builtin, it in BUILTINS.items():
        if name is not None and it.hub_id == name and it.find() is not None:
            known = values.get(FINGERPRINT) or _exported_fingerprint(directory)
            return builtin if known and _fingerprint(builtin, it.directory()) == known else None
    return None


def _fingerprint(builtin: str, place: Path) -> str | None:
    try:
        return fingerprint_of_files(place)
    except SafetensorError as error:
        raise damaged_weights(builtin, place, error) from error


def _exported_fingerprint(directory: RunDirectory) -> str | None:
    """The fingerprint of the base model in the weights of a LoRA that we exported; ``None`` if it is not told."""
    try:
        with safe_open(directory.adapter / SAFETENSORS_WEIGHTS_NAME, framework="pt") as file:
            return (file.metadata() or {}).get(FINGERPRINT)
    except (OSError, SafetensorError):  # loading the adapter tells what is wrong
        return None


def _method_of(values: Mapping[str, Any]) -> str | None:
    """The method that makes such an adapter, the first of several, and of those one that is trained itself if there is any;
    ``None`` if there is none."""
    kind, posterior = values.get("peft_type"), values.get("posterior")
    if kind == "BAYESLORA":
        found = [method for method in ALL.values() if posterior in method.posteriors]
        return min(found, key=lambda method: method.fit_post_hoc is not None).name if found else None
    if kind == PLAIN:
        return "lora" if _is_plain(values) else "monteclora"
    return str(kind).lower() if str(kind).lower() in FOREIGN else None


def portable_settings(result: RunResult) -> dict[str, Any]:
    """Of a run's settings those that predictions need on another machine; no path is among them."""
    data, prediction = result.config.get("data", {}), result.config.get("prediction", {})
    kept = ["samples", "batch_tokens", "draw_layers", "max_new_tokens"]
    if is_hub_id(prediction.get("nli")):
        kept.append("nli")
    return {
        "seed": result.seed,
        "data": {name: data[name] for name in ("scoring", "max_tokens", "columns") if name in data},
        "prediction": {name: prediction[name] for name in kept if name in prediction},
        "kind": result.kind,
        "labels": None if result.labels is None else list(result.labels),
    }


def _with_settings(run: RunConfig, values: dict[str, Any], path: Path) -> RunConfig:
    """A run with settings from beside its adapter, which are checked like those of any file."""
    try:
        told: dict[str, Any] = {name: values[name] for name in ("seed", "data", "prediction") if name in values}
        return from_dict({**to_dict(run), **told})
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def read_kind(directory: RunDirectory) -> RunResult | None:
    """The kind of task and the labels of an adapter that was uploaded, as a result without figures."""
    path = directory.path / SETTINGS
    if not path.exists():
        return None
    values = read_object(path)
    labels = values.get("labels")
    if labels is not None and not (isinstance(labels, list) and all(isinstance(it, str) for it in labels)):
        raise InputError(f"{path}: labels is {labels!r}; give a list of texts, or null")
    return RunResult.read(
        {"config": {}, "metrics": {}, "kind": values.get("kind"), "labels": values.get("labels")}, path
    )


def load_any_adapter(loaded: LoadedModel, directory: RunDirectory) -> PeftModel:
    """The base model with an adapter of ours, or with a plain LoRA as our ``point``."""
    if not is_plain(directory):
        return load_adapter(loaded.model, directory.adapter)
    path = str(directory.adapter)
    config = PeftConfig.from_pretrained(path)
    assert isinstance(config, LoraConfig)
    ours = BayesLoraConfig(
        posterior="point",
        r=max([config.r, *config.rank_pattern.values()]),
        lora_alpha=config.lora_alpha,
        target_modules=config.target_modules,
        exclude_modules=config.exclude_modules,
        layers_to_transform=config.layers_to_transform,
        layers_pattern=config.layers_pattern,
        fan_in_fan_out=config.fan_in_fan_out,
        base_model_name_or_path=config.base_model_name_or_path,
    )
    try:
        model = get_peft_model(loaded.model, ours)
    except ValueError as error:
        raise InputError(f"{directory.path}: {error}") from error
    start_from_lora(model, find_holder(model), "default", path)
    return model.eval()


def require_method(model: PeftModel, config: RunConfig, directory: RunDirectory) -> None:
    """Refuse an adapter that does not match the run's method."""
    method = find_method(config.method)
    known: tuple[str | None, ...] = (None,) if method.foreign() else method.posteriors
    found = getattr(model.peft_config["default"], "posterior", None)
    if found not in known:
        raise InputError(
            f"{directory.path}: its settings say method {method.name!r}, but its adapter holds {found or 'something else'}; "
            f"restore {directory.config.name}, or train again with --force"
        )


def is_plain(directory: RunDirectory) -> bool:
    """Whether it is a plain LoRA that PEFT has saved, and no run's adapter."""
    return directory.is_adapter and _is_plain(read_object(directory.adapter / CONFIG_NAME))


def _is_plain(values: Mapping[str, Any]) -> bool:
    return values.get("peft_type") == PLAIN and not values.get("monteclora_config")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({first_line(error)}); restore it") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds no JSON object; restore it")
    return values
