"""The tuner: wraps the target layers of a model, adds the posterior to it, and gives access to its draws."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import init_empty_weights
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.other import AuxiliaryTrainingWrapper, get_pattern_key
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bayeslora.adapter.base import ATTRIBUTE
from bayeslora.adapter.base_fingerprint import fingerprint_of
from bayeslora.adapter.build import build
from bayeslora.adapter.config import BayesLoraConfig
from bayeslora.adapter.elbo import elbo, labels_per_example
from bayeslora.adapter.expressions import require_quick
from bayeslora.adapter.holder import PosteriorHolder, is_hook_of
from bayeslora.adapter.identity import name_base, note_base
from bayeslora.adapter.layer import BayesLoraLinear
from bayeslora.adapter.lora import export_samples, start_from_lora
from bayeslora.adapter.quantised import quantisation_backend
from bayeslora.models.four_bit import warn_of_wrong_rows
from bayeslora.posterior import KL
from bayeslora.posterior.noise import Variates

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Target modules where they are not given: those of ``bayeslora train``."""

LARGEST_WASTE = 1_000_000
"""Maximum size of a layer's factors at a rank above the layer's own, where the excess is useless."""


class BayesLoraModel(BaseTuner):
    """A model whose linear layers have a distribution over LoRA factors. Created by ``peft.get_peft_model``."""

    prefix = "bayeslora_"
    tuner_layer_cls = (BayesLoraLinear, PosteriorHolder)
    target_module_mapping: ClassVar = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and not its ``forward`` (as PEFT 0.20 does), so that the hook that draws is run."""
        return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's ``generate``, which needs one row for each row of the batch."""
        n = self.holder.rows_returned
        if n > 1:
            raise ValueError(
                f"generate cannot use {n} draws with fan_out=True, for which the model returns {n} rows for each text; leave out "
                f"fan_out and give the batch {n} times, or use posterior_predictive, which averages the draws"
            )
        with self.holder.one_draw():
            return self.model.generate(*args, **kwargs)

    # Draws --------------------------------------------------------------------------------------------------------

    def draw(
        self,
        n: int = 1,
        generator: torch.Generator | None = None,
        *,
        variates: Variates = "antithetic",
        layers: str = "all",
        fan_out: bool = False,
    ) -> None:
        """Draw ``n`` networks now and use them until the next :meth:`draw`, :meth:`deterministic` or :meth:`automatic`.

        The batch is then ``n`` blocks of equal size, and block ``k`` is computed with draw ``k``. With ``fan_out`` it is given
        once, and the model repeats it where the draws begin to differ: in the ``layers`` (``all``, ``last:K`` or a fraction) that
        use draws; those below use the posterior mean. ``variates`` arranges the noise of the draws.
        """
        self.holder.draw(n, generator, variates=variates, layers=layers, fan_out=fan_out)

    @contextmanager
    def draws(
        self,
        n: int = 1,
        generator: torch.Generator | None = None,
        *,
        variates: Variates = "antithetic",
        layers: str = "all",
        fan_out: bool = False,
    ) -> Iterator[None]:
        """Same as :meth:`draw` inside the block; restores the previous state after it."""
        with self.holder.restoring():
            self.holder.draw(n, generator, variates=variates, layers=layers, fan_out=fan_out)
            yield

    def deterministic(self) -> AbstractContextManager[None]:
        """Use the posterior mean from now on; as a context manager, inside the block only."""
        restoring = self.holder.restoring()
        self.holder.deterministic()
        return restoring

    def automatic(self, draws: int | None = None) -> None:
        """Return to the default: fresh draws in every forward pass of training, the posterior mean in evaluation.

        Args:
            draws: number of draws among which a batch of training is divided, at most; it divides the number of rows. Without
                it the posterior decides. Give 1 if the loss compares rows of a batch with each other, as those of preferences
                and contrastive losses do: such rows have to be predicted by the same network.
        """
        if draws is not None and draws < 1:
            raise ValueError(f"number of draws must be at least 1, got {draws}")
        self.holder.automatic()
        self.holder.most_draws = draws

    def seed_draws(self, seed: int) -> None:
        """Draw from a separate generator instead of torch's global one, so that draws are reproducible."""
        self.holder.seed(seed)

    def kl(self) -> KL:
        """KL of the active adapters to their prior, at the draws of the last forward pass."""
        return self.holder.kl()

    def elbo(
        self, loss: Tensor, *, examples: int, labels: Tensor | float | None = None, parts: int = 1, beta: float = 1.0
    ) -> Tensor:
        """The training objective: a mean loss plus the KL at the same draw, with the weight that makes it the bound.

        Call it right after the forward pass that computed the loss, and call ``backward`` on the result.

        Args:
            loss: the batch's mean loss, as transformers' models return it. With several ``parts``, the loss of one of them
                divided by their number.
            examples: number of training examples.
            labels: the batch's labels, over which the loss is a mean, or their number per example. Without them the loss is a
                mean over examples.
            parts: micro-batches in an optimiser step; the KL counts once in all of them.
            beta: multiplier of the KL; 1 is the bound.
        """
        if examples < 1 or parts < 1:
            raise ValueError(f"need examples >= 1 and parts >= 1, got {examples} and {parts}")
        terms = examples * labels_per_example(1.0 if labels is None else labels)
        return elbo(self.holder, loss, beta / terms, parts=parts).total

    def aim(self, losses: Iterable[Callable[[], Tensor]]) -> None:
        """Align the posterior with the directions in which a loss falls fastest; call it once, before training.

        Args:
            losses: functions that run the model on some training data and return the loss.
        """
        self.holder.aim(losses)

    def after_step(self, step: int, steps: int) -> None:
        """Notify the posterior, in your own training loop, that ``step`` of ``steps`` is done, counted from 1.

        Snapshots, AdaLoRA's budget and SWAG's iterates need it, before the gradients are cleared.
        """
        self.holder.after_step(step, steps)

    def start_from_lora(self, path: str, adapter_name: str | None = None) -> None:
        """Set the posterior's mean to the ordinary LoRA adapter at ``path`` (a directory or a hub id).

        Exact for ``point`` and ``ensemble``, and for ``inducing`` with separate matrices at least as large as the rank.
        """
        start_from_lora(self.model, self.holder, adapter_name or self._active_name(), path)

    def export_samples(
        self,
        n: int,
        path: str | Path,
        generator: torch.Generator | None = None,
        adapter_name: str | None = None,
    ) -> list[Path]:
        """Write the posterior mean and ``n`` draws as ordinary LoRA adapters that do not need this package.

        Returns their directories under ``path``: ``mean``, ``sample-000``, ...
        """
        name = adapter_name or self._active_name()
        posterior, config = self.holder.posterior(name), self.peft_config[name]
        return export_samples(self.model, config, posterior, name, n, path, generator)

    @property
    def posterior_scale(self) -> float:
        """Multiplier of the standard deviations of the active adapter's posterior; saved with the adapter."""
        return self.holder.posterior(self._active_name()).scale

    @posterior_scale.setter
    def posterior_scale(self, value: float) -> None:
        for name in self.holder.active:
            self.holder.posterior(name).scale = value
            self.peft_config[name].posterior_scale = float(value)

    @property
    def name_or_path(self) -> str:
        """Name of the base model for model cards, if it has one."""
        for config in self.peft_config.values():
            if config.portable_base:
                return config.portable_base
        raise AttributeError("the base model has no name")

    @property
    def holder(self) -> PosteriorHolder:
        """The module that owns the posteriors."""
        holder = getattr(self.model, ATTRIBUTE)
        assert isinstance(holder, PosteriorHolder)
        return holder

    def _active_name(self) -> str:
        active = self.holder.active
        if len(active) != 1:
            raise ValueError(f"exactly one adapter must be active for this, got {active}")
        return active[0]

    # Injection ----------------------------------------------------------------------------------------------------

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Wrap the target layers, then build their posterior. If that fails, the model is restored.

        The holder joins the model only after the first injection: PEFT assumes that the base of a model with tuner layers is
        frozen already. Its state is one stack for all layers, so the keys of a ``state_dict`` do not determine the layers; the
        configuration does.
        """
        config = self.peft_config[adapter_name]
        require_quick(config.expressions, [name for name, _ in model.named_modules()])
        self._new_holder = getattr(model, ATTRIBUTE, None) or PosteriorHolder(fingerprint_of(model))
        note_base(config, self._new_holder.base_fingerprint)
        name_base(config, model)
        warn_of_wrong_rows(model)
        before = {name for name, layer in _adapted(model).items() if adapter_name in layer.r}
        try:
            with _without_tokens(config):
                super().inject_adapter(
                    model,
                    adapter_name,
                    autocast_adapter_dtype=autocast_adapter_dtype,
                    low_cpu_mem_usage=low_cpu_mem_usage,
                )
            for path in before - set(self.targeted_module_names):  # an adapter of the same name is replaced
                _adapted(model)[path].leave(adapter_name)
            self._add_posterior(model, adapter_name, self._new_holder, low_cpu_mem_usage)
        except BaseException:  # including interruptions
            _take_out(model, adapter_name, before)
            raise
        finally:
            del self._new_holder

    def _add_posterior(self, model: nn.Module, adapter_name: str, holder: PosteriorHolder, empty: bool) -> None:
        if not hasattr(model, ATTRIBUTE):
            setattr(model, ATTRIBUTE, holder)
            holder.train(self._starts_in_training)
            model.register_forward_pre_hook(holder.before_forward, with_kwargs=True)
            model.register_forward_hook(holder.after_forward)
        config = self.peft_config[adapter_name]
        with init_empty_weights() if empty else nullcontext():
            posterior = build(model, adapter_name, config, holder.adapters_added)
        holder.add(adapter_name, posterior, self.active_adapters)
        if not next(posterior.parameters()).is_meta:
            posterior.to(_device(model))
        posterior.requires_grad_(adapter_name in self.active_adapters and not config.inference_mode)

    @property
    def _starts_in_training(self) -> bool:
        """Mode of new modules: the model's own where transformers adapts it, for there is no ``PeftModel`` whose mode counts."""
        native = getattr(self.model, "_hf_peft_config_loaded", False)
        return bool(self.model.training if native else self.training)

    def _create_and_replace(
        self,
        peft_config: BayesLoraConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        rank = peft_config.rank_pattern.get(
            get_pattern_key(peft_config.rank_pattern.keys(), current_key), peft_config.r
        )
        alpha_key = get_pattern_key(peft_config.alpha_pattern.keys(), current_key)
        alpha = peft_config.alpha_pattern.get(alpha_key, peft_config.lora_alpha)
        if isinstance(target, BayesLoraLinear):
            layer = target
        else:
            layer = BayesLoraLinear(
                target, current_key, self._new_holder, _fan_in_fan_out(target, peft_config, current_key)
            )
            layer.train(self._starts_in_training)
            self._replace_module(parent, target_name, layer, target)
        _check_rank(layer, rank)
        layer.update_layer(adapter_name, rank, peft_config.scaling(rank, alpha), peft_config.lora_dropout)

    def _check_new_adapter_config(self, config: BayesLoraConfig) -> None:
        """Validate again: settings may have been changed after construction."""
        config.check()
        super()._check_new_adapter_config(config)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        """Replace a module by another, which has its weights already: ours are those of the layer it wraps."""
        setattr(parent, child_name, new_module)

    def _prepare_adapter_config(self, peft_config: BayesLoraConfig, model_config: dict[str, Any]) -> BayesLoraConfig:
        """Default to the projections of attention; for models with other names, to LoRA's targets."""
        if peft_config.target_modules is None:
            leaves = {name.rpartition(".")[2] for name, _ in self.model.named_modules()}
            if leaves >= {"q_proj", "k_proj"}:
                peft_config.target_modules = leaves & set(DEFAULT_TARGETS)
        return super()._prepare_adapter_config(peft_config, model_config)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Keep posteriors in float32; with ``autocast_adapter_dtype=False`` they get the base model's precision."""
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        if not autocast_adapter_dtype:
            layer = next(m for m in self.model.modules() if isinstance(m, BayesLoraLinear))
            dtype = layer.get_base_layer().weight.dtype
            if dtype.is_floating_point:
                self.holder.posterior(adapter_name).to(dtype)

    # Mixed batches ------------------------------------------------------------------------------------------------

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Pass ``adapter_names=[...]``, one adapter per row of the batch, to the layers; posterior means only."""
        names = kwargs.pop("adapter_names", None)
        if names is None:
            yield
            return
        beams = kwargs.get("num_beams") or 1
        with self.holder.mixed(names, training=self.training):
            rows = [name for name in names for _ in range(beams)]
            layers = [m for m in self.modules() if isinstance(m, (BayesLoraLinear, AuxiliaryTrainingWrapper))]
            hook = partial(_pass_adapter_names, adapter_names=rows)
            handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    # Merging and unloading ----------------------------------------------------------------------------------------

    def _check_merge_allowed(self) -> None:
        tied = self._get_tied_target_modules(self.model)
        if tied:
            warnings.warn(
                f"merging unties {', '.join(tied)} from the input embedding, which the update must not touch: the merged "
                "model holds one more weight of that size",
                stacklevel=3,
            )

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> nn.Module:
        model = super()._unload_and_optionally_merge(*args, **kwargs)
        remove_holder(model)
        return model


def remove_holder(model: nn.Module) -> None:
    """Remove the holder and its hooks from a base model."""
    holder = getattr(model, ATTRIBUTE)
    delattr(model, ATTRIBUTE)
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [k for k, hook in hooks.items() if is_hook_of(holder, hook)]:
                del hooks[key]


def _adapted(model: nn.Module) -> dict[str, BayesLoraLinear]:
    """The wrapped layers, by their paths."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, BayesLoraLinear)}


def _take_out(model: nn.Module, adapter_name: str, but: Container[str]) -> None:
    """Remove an adapter that could not be built, except from the layers in ``but``; unwrap layers without adapters."""
    for path, layer in _adapted(model).items():
        if path not in but:
            layer.leave(adapter_name)
        if not layer.r:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer.base_layer)
    if hasattr(model, ATTRIBUTE) and not _adapted(model):
        remove_holder(model)


def _pass_adapter_names(
    module: nn.Module, args: Any, kwargs: dict[str, Any], adapter_names: list[str]
) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "adapter_names": adapter_names}


@contextmanager
def _without_tokens(config: BayesLoraConfig) -> Iterator[None]:
    """Inside the block, represent the absence of trained tokens by ``None``, as PEFT's injection expects."""
    config.trainable_token_indices = config.trainable_token_indices or None
    try:
        yield
    finally:
        config.trainable_token_indices = config.trainable_token_indices or {}


def _check_rank(layer: BayesLoraLinear, rank: int) -> None:
    """Refuse ranks that a layer cannot use, if they are expensive."""
    sizes = layer.out_features, layer.in_features
    if rank > min(sizes) and rank * sum(sizes) > LARGEST_WASTE:
        raise ValueError(
            f"rank {rank} is more than {layer.name} has use for ({sizes[1]} inputs, {sizes[0]} outputs): set r, or rank_pattern "
            f"for this module, to at most {min(sizes)}"
        )


def _fan_in_fan_out(target: nn.Module, config: BayesLoraConfig, name: str) -> bool:
    """Whether the weight is stored transposed; refuses modules that are not linear."""
    if isinstance(target, Conv1D):
        return True
    if isinstance(target, nn.Linear):
        if config.fan_in_fan_out:
            warnings.warn(
                f"fan_in_fan_out is set but {name} is a torch.nn.Linear, which it does not fit; ignored", stacklevel=4
            )
        return False
    if isinstance(target, BaseTunerLayer):
        raise ValueError(
            f"target module {name} has an adapter of another method already; call merge_and_unload() or unload() on the model "
            "with that adapter first"
        )
    backend = quantisation_backend(target)
    if backend is not None and backend.layer_type == "linear":
        return False
    raise ValueError(
        f"target module {name} ({type(target).__name__}) is not supported: bayeslora adapts torch.nn.Linear, Conv1D and "
        "quantised linear layers (expert weights of a mixture of experts are none of these: adapt attention and the head)"
    )


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
