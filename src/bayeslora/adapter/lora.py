"""Conversion of an ordinary LoRA adapter to a posterior, and of a posterior to ordinary LoRA adapters.

Exported adapters do not need this package: the scaling is folded into ``B`` (serving engines have one ``lora_alpha / r``
for all layers) and the rank is padded with zeros to a size that vLLM accepts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftConfig
from peft.utils import load_peft_weights
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from torch import Tensor, nn

from bayeslora.adapter.config import BayesLoraConfig
from bayeslora.adapter.holder import PosteriorHolder
from bayeslora.adapter.layer import BayesLoraLinear
from bayeslora.adapter.sampling import evaluating
from bayeslora.adapter.sound import require_finite, require_floats
from bayeslora.errors import InputError
from bayeslora.posterior import Factors, PointPosterior, Posterior

CHANGING_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of PEFT's ``init_lora_weights`` with which the base model's weights are changed, too; some have more behind them."""

FINGERPRINT = "base_fingerprint"
"""Where the weights of an exported LoRA tell the fingerprint of its base model, which PEFT's settings have no place for."""

SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that a vLLM server can be configured with."""


def adapted_layers(model: nn.Module, adapter: str) -> dict[str, BayesLoraLinear]:
    """The layers an adapter acts on, by name."""
    return {m.name: m for m in model.modules() if isinstance(m, BayesLoraLinear) and adapter in m.scaling}


# LoRA to posterior ------------------------------------------------------------------------------------------------


def start_from_lora(model: nn.Module, holder: PosteriorHolder, adapter: str, path: str) -> None:
    """Set the mean of a posterior to the LoRA adapter at ``path`` (a directory or a hub id)."""
    holder.posterior(adapter).start_from(read_lora(model, holder, adapter, path))


def read_lora(model: nn.Module, holder: PosteriorHolder, adapter: str, path: str) -> Factors:
    """The factors of the LoRA adapter at ``path``, PEFT's own or our ``point``, as one draw for the layers of ``adapter``."""
    config = PeftConfig.from_pretrained(path)
    layers = adapted_layers(model, adapter)
    if isinstance(config, BayesLoraConfig) and (config.snapshots or config.modules_to_save):
        more = "snapshots" if config.snapshots else f"trained {', '.join(config.modules_to_save or ())}"
        raise InputError(f"the adapter at {path} has {more} besides one LoRA; only plain LoRA can be started from")
    weights = load_peft_weights(path, device="cpu")
    require_floats(weights)
    require_finite(weights, path)
    if isinstance(config, LoraConfig):
        _check_plain(path, config)
        _check_same_layers(path, _lora_layers(weights), layers)
        _check_nothing_else(path, weights, model, layers)
        pairs = {name: _read_layer(path, config, weights, layer, adapter) for name, layer in layers.items()}
    elif isinstance(config, BayesLoraConfig) and config.posterior == "point":
        _check_same_layers(path, set(config.layer_names or ()), layers)
        pairs = _read_point(path, config, weights, layers, adapter)
    else:
        kind = config.posterior if isinstance(config, BayesLoraConfig) else config.peft_type
        raise InputError(f"{path} holds a {kind} adapter; only plain LoRA can be started from")
    posterior = holder.posterior(adapter)
    device = next(posterior.parameters()).device
    A, B = (
        tuple(
            torch.stack([pairs[name][k] for name in group.names]).unsqueeze(1).to(device)
            for group in posterior.all_groups
        )
        for k in (0, 1)
    )
    return Factors(posterior.all_groups, A, B)


def _check_plain(path: str, config: LoraConfig) -> None:
    """Refuse LoRAs that are more than ``W + B A`` for the base model's own ``W``."""
    start = str(config.init_lora_weights)
    if start.startswith(CHANGING_BASE):
        raise InputError(
            f"the LoRA adapter at {path} began with init_lora_weights={start!r}, which changes the base model's weights; "
            "let PEFT make a plain LoRA of it: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    kinds = {"DoRA": config.use_dora, "aLoRA": bool(getattr(config, "alora_invocation_tokens", None))}
    for kind in (name for name, given in kinds.items() if given):
        raise InputError(f"the LoRA adapter at {path} is of the kind {kind}; only plain LoRA can be started from")


def _lora_layers(weights: dict[str, Tensor]) -> set[str]:
    suffix = ".lora_A.weight"
    return {key.removeprefix("base_model.model.").removesuffix(suffix) for key in weights if key.endswith(suffix)}


def _check_same_layers(path: str, given: set[str], layers: dict[str, BayesLoraLinear]) -> None:
    if given != set(layers):
        example = sorted(given ^ set(layers))[0]
        raise InputError(
            f"the LoRA adapter at {path} adapts {len(given)} layers and this one {len(layers)}; they must be the same "
            f"(for example {example} is in one only); set target_modules and layers_to_transform as in its adapter_config.json, "
            "which are --targets and --layers on the command line"
        )


def _check_nothing_else(
    path: str, weights: dict[str, Tensor], model: nn.Module, layers: dict[str, BayesLoraLinear]
) -> None:
    """Refuse other trained weights, which would be lost; the frozen weights that PEFT saves with adapted heads are ignored."""
    factors = {f"base_model.model.{name}.lora_{factor}.weight" for name in layers for factor in "AB"}
    named = model.named_parameters(remove_duplicate=False)  # a tied head has two names
    frozen = {name.removeprefix("base_model.model."): parameter for name, parameter in named}  # of a PeftModel, too
    for key in sorted(set(weights) - factors):
        own = frozen.get(key.removeprefix("base_model.model."))
        if own is None or not torch.equal(own.detach().to("cpu", weights[key].dtype), weights[key]):
            raise InputError(
                f"the LoRA adapter at {path} has trained more than its factors, such as {key}, which would be lost; train it "
                "without modules_to_save, biases and embeddings"
            )


def _alpha(config: LoraConfig | BayesLoraConfig, layer: str) -> float:
    """``alpha`` of one layer."""
    alpha: float = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), layer), config.lora_alpha)
    return alpha


def _read_layer(
    path: str, config: LoraConfig, weights: dict[str, Tensor], layer: BayesLoraLinear, adapter: str
) -> tuple[Tensor, Tensor]:
    """``A`` and ``B`` of one layer at our rank, with ``B`` converted from LoRA's scaling to ours."""
    A, B = (weights.get(f"base_model.model.{layer.name}.lora_{factor}.weight", torch.empty(0)) for factor in "AB")
    rank, ours = len(A), layer.r[adapter]
    if A.shape != (rank, layer.in_features) or B.shape != (layer.out_features, rank):
        raise InputError(
            f"the LoRA adapter at {path} holds {_size(A)} and {_size(B)} for {layer.name}, a layer of {layer.in_features} inputs "
            f"and {layer.out_features} outputs; take the base model that it was trained on, or restore the adapter"
        )
    if rank > ours:
        raise InputError(
            f"the LoRA adapter at {path} has rank {rank} in {layer.name}, above ours, {ours}; set r={rank}"
        )
    scaling = _alpha(config, layer.name) / (rank**0.5 if config.use_rslora else rank)
    return _pad(A.float(), B.float() * (scaling / layer.scaling[adapter]), ours)


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) if tensor.numel() else "nothing"


def _read_point(
    path: str, config: BayesLoraConfig, weights: dict[str, Tensor], layers: dict[str, BayesLoraLinear], adapter: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """``A`` and ``B`` of every layer of our own point estimate, with ``B`` converted from its scaling to ours."""
    point = PointPosterior([layers[name].shape(adapter) for name in config.layer_names or ()])
    try:
        point.load_state_dict({key.rpartition(".")[2]: value for key, value in weights.items()})
    except RuntimeError as error:
        ranks = sorted({layer.r[adapter] for layer in layers.values()})
        raise InputError(f"the adapter at {path} has rank {config.r}, and here it is {ranks}; set the same") from error
    factors = point.mean().detach()

    def change(layer: BayesLoraLinear) -> float:
        return config.scaling(layer.r[adapter], _alpha(config, layer.name)) / layer.scaling[adapter]

    return {name: (factors[name].A[0], factors[name].B[0] * change(layers[name])) for name in factors}


def _pad(A: Tensor, B: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Pad ``A [R, i]`` and ``B [o, R]`` with zeros to a higher rank, which keeps their product."""
    return F.pad(A, (0, 0, 0, rank - A.shape[0])), F.pad(B, (0, rank - B.shape[1]))


# Posterior to LoRA ------------------------------------------------------------------------------------------------


def export_samples(
    model: nn.Module,
    config: BayesLoraConfig,
    posterior: Posterior,
    adapter: str,
    n: int,
    path: str | Path,
    generator: torch.Generator | None = None,
) -> list[Path]:
    """Write the mean and ``n`` draws as ordinary LoRA adapters; returns their directories, the mean first."""
    for name in ("modules_to_save", "trainable_token_indices"):
        if given := getattr(config, name):
            raise InputError(f"{name}={given} cannot be exported: serving engines refuse them")
    root = Path(path)
    if root.exists() and any(root.iterdir()):
        raise InputError(f"{root} is not empty; choose another directory for the exported adapters")
    layers = adapted_layers(model, adapter)
    with torch.no_grad(), evaluating(posterior):  # so that draws are whole networks, as in prediction
        draws = posterior.draw(n, generator) if n > 0 else None
        mean = posterior.mean()
    if mean.inners or (draws is not None and draws.inners):
        raise InputError(f"draws of {config.posterior!r} depend on the input: no LoRA adapter is equal to one")
    directories = [_write(root / "mean", model, config, mean, layers, adapter)]
    for k in range(n):
        assert draws is not None
        directories.append(_write(root / f"sample-{k:03d}", model, config, draws.pick(k), layers, adapter))
    return directories


def _write(
    directory: Path,
    model: nn.Module,
    config: BayesLoraConfig,
    factors: Factors,
    layers: dict[str, BayesLoraLinear],
    adapter: str,
) -> Path:
    rank = _served_rank(max(a.shape[-2] for a in factors.A))
    tensors = dict(_lora_tensors(factors, layers, adapter, rank))
    require_finite(tensors, f"{directory.name} of adapter {adapter!r}")
    directory.mkdir(parents=True)
    known = {} if config.base_fingerprint is None else {FINGERPRINT: config.base_fingerprint}
    weights = directory / "adapter_model.safetensors"
    save_file(tensors, str(weights), metadata={"format": "pt", **known})
    _sort_metadata(weights)
    LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=_target_modules(model, list(layers)),
        fan_in_fan_out=config.fan_in_fan_out,
        base_model_name_or_path=config.portable_base,
        task_type=config.task_type,
        inference_mode=True,
    ).save_pretrained(str(directory))
    return directory


def _sort_metadata(weights: Path) -> None:
    """Sort the metadata of a safetensors file, which are written in random order, so that equal weights are equal files."""
    with weights.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def _lora_tensors(
    factors: Factors, layers: dict[str, BayesLoraLinear], adapter: str, rank: int
) -> Iterator[tuple[str, Tensor]]:
    for name, layer in layers.items():
        A, B = (factor[0].detach().float().cpu() for factor in factors[name])
        A, B = _pad(A, B * layer.scaling[adapter], rank)
        yield f"base_model.model.{name}.lora_A.weight", A.contiguous()
        yield f"base_model.model.{name}.lora_B.weight", B.contiguous()


def _served_rank(rank: int) -> int:
    """The smallest rank that a server accepts and that is not below this one."""
    return next((served for served in SERVED_RANKS if served >= rank), rank)


def _target_modules(model: nn.Module, names: list[str]) -> list[str]:
    """Last parts of the names if they match exactly these layers, else the full names."""
    leaves = {name.rpartition(".")[2] for name in names}
    alike = {key for key, _ in model.named_modules() if key.rpartition(".")[2] in leaves}
    return sorted(leaves) if alike == set(names) else sorted(names)
