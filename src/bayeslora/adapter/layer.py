"""An adapted linear layer: ``base(x) + s · B (A x)``. It has no random state; the holder supplies its factors."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bayeslora.adapter.holder import PosteriorHolder
from bayeslora.adapter.quantised import quantisation_backend
from bayeslora.adapter.recompute import project
from bayeslora.adapter.tuner_module import TunerModule
from bayeslora.posterior import IllConditionedError, LayerFactors, LayerShape
from bayeslora.posterior.inner import Inner


class BayesLoraLinear(TunerModule):
    """Wraps one linear layer (``nn.Linear``, GPT-2's ``Conv1D`` or a quantised one)."""

    adapter_layer_names = ()
    other_param_names = ("r", "scaling", "dropout")
    holder: PosteriorHolder

    def __init__(self, base_layer: nn.Module, name: str, holder: PosteriorHolder, fan_in_fan_out: bool) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.name = name
        self.__dict__["holder"] = holder  # not a child: it is registered once, on the base model
        self.quantization_backend = quantisation_backend(base_layer)
        self.out_features, self.in_features = linear_shape(base_layer)
        self.fan_in_fan_out = fan_in_fan_out
        self.r: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.dropout: dict[str, float] = {}
        self._original: tuple[nn.Module, dict[str, Any]] | None = None

    def update_layer(self, adapter_name: str, r: int, scaling: float, dropout: float = 0.0) -> None:
        """Add this layer to an adapter."""
        self.r[adapter_name] = r
        self.scaling[adapter_name] = scaling
        self.dropout[adapter_name] = dropout

    def leave(self, adapter_name: str) -> None:
        """Remove this layer from an adapter."""
        for settings in (self.r, self.scaling, self.dropout):
            settings.pop(adapter_name, None)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter. If it was active, the holder chooses another one for all layers, which need not have the same."""
        self.holder.delete_adapter(adapter_name)
        self.leave(adapter_name)
        self._active_adapter = self.holder.active_adapters

    def shape(self, adapter_name: str) -> LayerShape:
        """Shape of this layer, for the posterior of an adapter."""
        return LayerShape(self.name, self.out_features, self.in_features, self.r[adapter_name])

    # Forward ------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        """``base(x)`` plus the updates of the active adapters, or of one adapter per row of a mixed batch."""
        if adapter_names is not None and len(adapter_names) != len(x):
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(adapter_names)} and {len(x)} respectively."
            )
        disabled = self.disable_adapters or self.holder.disable_adapters  # it may have joined while they were disabled
        if disabled and self.merged:
            self.unmerge()
        result = self.base_layer(x, *args, **kwargs)
        if disabled or self.merged:
            return result
        if self.quantization_backend is not None:
            result = self.quantization_backend.maybe_clone_base_result(result)
        if adapter_names is not None:
            return self._mixed(x, result, adapter_names)
        for name in self.active_adapters:
            if name in self.scaling:
                dropping = self.training and name not in self.holder.fixed
                result = self._updated(name, F.dropout(x, self.dropout[name], dropping), result)
        return result

    def _updated(self, name: str, x: Tensor, result: Tensor) -> Tensor:
        """Add the update of one adapter to the result."""
        factors, inner = self.holder.factors(name, self.name), self.holder.inner(name, self.name)
        return add_update(x, result, factors, self.scaling[name], inner)

    def _mixed(self, x: Tensor, result: Tensor, adapter_names: list[str]) -> Tensor:
        """Update row ``k`` of the batch by adapter ``adapter_names[k]``; ``__base__`` means none."""
        result = result.clone()
        for name in set(adapter_names) & self.scaling.keys():
            rows = [k for k, wanted in enumerate(adapter_names) if wanted == name]
            result[rows] = self._updated(name, x[rows], result[rows])
        return result

    # Merging ------------------------------------------------------------------------------------------------------

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Mean update in the layout of the base weight."""
        delta = self.holder.mean_update(adapter, self.name) * self.scaling[adapter]
        return delta.T if self.fan_in_fan_out else delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the mean update to the base weight. The original weight object is kept, so unmerging is exact and a
        weight tied to another module stays as it is there."""
        if self.quantization_backend is not None and not self.quantization_backend.supports_merge:
            raise TypeError(f"{self.quantization_backend.backend_name} layers cannot be merged")
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.scaling:
                continue
            merged = self._safely_merged_weight(name) if safe_merge else self._merged_weight(name)
            if self._original is None:
                self._original = _remember(self.get_base_layer())
            self._store(merged)
            self.merged_adapters = [*self.merged_adapters, name]

    def _safely_merged_weight(self, name: str) -> Tensor:
        """The merged weight; raises if it is not finite."""
        broken = (
            f"NaNs detected in the merged weights. The adapter {name} seems to be broken, or the weight of {self.name}"
        )
        try:
            merged = self._merged_weight(name)
        except IllConditionedError as error:
            raise ValueError(broken) from error
        if not torch.isfinite(merged).all():
            raise ValueError(broken)
        return merged

    def _merged_weight(self, name: str) -> Tensor:
        weight = self.get_base_weight()
        delta = self.get_delta_weight(name).to(weight.device)
        return (
            (weight.float() + delta).to(weight.dtype) if weight.dtype.itemsize < 4 else weight + delta.to(weight.dtype)
        )

    def _store(self, weight: Tensor) -> None:
        if self.quantization_backend is not None:
            self.set_base_weight(weight)
        else:
            base = self.get_base_layer()
            base.weight = nn.Parameter(weight, requires_grad=base.weight.requires_grad)

    def unmerge(self) -> None:
        """Restore the original weight, on the device and in the precision that the model has now."""
        if self._original is not None:
            now = self.get_base_weight()
            self.base_layer, attributes = self._original
            for name, value in attributes.items():
                setattr(self.base_layer, name, value)
            own = self.get_base_layer().weight
            if self.quantization_backend is None and (own.dtype, own.device) != (now.dtype, now.device):
                own.data = own.data.to(now)
        self._original = None
        self.merged_adapters = []

    def __repr__(self) -> str:
        return "bayeslora." + super().__repr__()


def add_update(x: Tensor, result: Tensor, factors: LayerFactors, scaling: float, inner: Inner | None = None) -> Tensor:
    """``result + s · B (A x)``; with ``n`` draws the rows of ``x`` are ``n`` equal blocks, block ``k`` for draw ``k``.

    ``inner``, if given, replaces ``A x``.
    """
    A, B = (factor.to(x) for factor in factors)  # precision, and device if the model is on several
    n = A.shape[0]
    if x.shape[0] % n:
        raise ValueError(
            f"with {n} draws in use the batch must consist of {n} blocks of equal size, got a batch of {x.shape[0]}"
        )
    if inner is None:
        hidden = project(x, A)
    else:
        rows = x.reshape(n, x.shape[0] // n, -1, x.shape[-1])
        hidden = inner.map(lambda tensor: tensor.to(x))(rows, A).flatten(1, 2)
    if result.dtype != hidden.dtype:
        return torch.add(result, torch.bmm(hidden, B.mT).view_as(result).to(result.dtype), alpha=scaling)
    # one call for product and sum: the scaling then costs nothing in the backward pass, and no update is kept in memory
    return torch.baddbmm(result.reshape(n, -1, result.shape[-1]), hidden, B.mT, alpha=scaling).view_as(result)


def _remember(layer: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """What merging replaces: the weight and, in 8-bit layers, its state."""
    attributes = {"weight": layer.weight}
    if hasattr(layer, "state"):
        attributes["state"] = copy.copy(layer.state)
    return layer, attributes


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """Output and input size of a linear layer."""
    if isinstance(layer, Conv1D):
        size_in, size_out = layer.weight.shape
        return size_out, size_in
    return int(layer.out_features), int(layer.in_features)  # type: ignore[arg-type]
