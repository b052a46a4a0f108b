"""One module per model that owns the posteriors of all adapters and the draws that its layers use.

It is a child of the base model, so that PEFT and transformers save, load, cast, freeze and shard it like any tuner layer. A
hook on the root of the model prepares the factors before every forward pass, outside of any checkpointed block:

===============  =====================================================
training         one fresh draw per forward pass
evaluation       the posterior mean, computed once and cached
:meth:`draw`     those draws, until another call changes that
===============  =====================================================

A training pass without gradients uses the draw of a pass before it whose gradient has not been taken: both belong to one step,
and the KL of that step is the one at this draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayeslora.adapter.aiming import aim
from bayeslora.adapter.base import AddUp, Holder, find_any_holder
from bayeslora.adapter.checkpoint_bridge import Bridge, uses_reentrant_checkpointing
from bayeslora.adapter.draw_expansion import DrawExpansion, Stack, batch_rows
from bayeslora.adapter.draws import Draws, Mode
from bayeslora.adapter.expansion_trial import may_begin
from bayeslora.adapter.factor_source import FactorSource
from bayeslora.adapter.gradient_draws import GradientDraws, in_backward
from bayeslora.adapter.kl_reminder import KLReminder
from bayeslora.adapter.sound import require_floats
from bayeslora.adapter.tuner_module import TunerModule
from bayeslora.adapter.version_counters import watch
from bayeslora.errors import InputError
from bayeslora.posterior import KL, Factors, LayerFactors, Posterior
from bayeslora.posterior.inner import Inner
from bayeslora.posterior.noise import Variates

KEPT = 4
"""Number of settings, such as numbers of draws, whose draws are cached, so that predictions can alternate between them."""


class PosteriorHolder(TunerModule, Holder):
    """Owner of the posteriors. For PEFT it is a tuner layer, though it adapts nothing itself.

    Args:
        base_fingerprint: identifies the base model (see :mod:`bayeslora.adapter.base_fingerprint`).

    Attributes:
        fixed: adapters that use their mean in training, too, and drop no inputs.
        adapters_added: their number, with those that were deleted since.
        most_draws: among which a batch of training is divided; ``None`` leaves it to the posterior.
    """

    adapter_layer_names = ("bayeslora_posterior",)
    weight = bias = None
    in_features = out_features = 0
    _disable_adapters: bool

    def __init__(self, base_fingerprint: str | None = None) -> None:
        super().__init__()
        self.base_fingerprint = base_fingerprint
        self.bayeslora_posterior = nn.ModuleDict()
        self.fixed: set[str] = set()
        self.most_draws: int | None = None
        self.adapters_added = 0
        self._source = FactorSource(self.bayeslora_posterior)
        self._reminder = KLReminder()
        self._forget()
        watch(self)  # or cached draws would outlive an optimiser step

    def _forget(self) -> None:
        """Drop all draws."""
        self._mode = Mode()
        self._kept: dict[tuple[Any, ...], Mode] = {}  # draws from seeds, by their settings
        self._drawn: dict[str, Draws] = {}
        self._prepared: tuple[Mode, bool] = Mode(), False  # what the last pass used, and whether in training
        self._learning = GradientDraws()
        self._mixed: list[str] | None = None
        self._bridge: Bridge | None = None
        self._rows = 1  # of the batch

    def __getstate__(self) -> dict[str, Any]:
        """Exclude draws, which belong to a graph and cannot be copied; a copy draws anew."""
        bare = PosteriorHolder.__new__(PosteriorHolder)
        bare.__dict__.update(self.__dict__)
        bare._forget()
        return bare.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        watch(self)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Refuse tensors that torch would silently cast to floats, or PEFT leave out. They belong to the posteriors below."""
        given = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        own = self.state_dict()
        require_floats({name: value for name, value in given.items() if isinstance(value, Tensor)}, own)
        strange = [name for name in given.keys() - own.keys() if self._is_of_an_adapter(name)]
        if strange:
            raise InputError(
                f"{min(strange)!r} is no tensor of the adapter of this name, whose rank, targets or posterior are others: load "
                "it as another adapter, or with the adapter_config.json that was saved with it"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _is_of_an_adapter(self, name: str) -> bool:
        """Whether a tensor is meant for an adapter that is here. PEFT leaves the adapter out of names that it does not know."""
        of, *rest = name.split(".")
        return of == "bayeslora_posterior" and (len(rest) == 1 or rest[0] in self.bayeslora_posterior)

    def forward(self, x: Any) -> Any:
        """Identity: a base model that calls its children in turn may call the holder too."""
        return x

    # Posteriors ---------------------------------------------------------------------------------------------------

    def posterior(self, adapter: str) -> Posterior:
        """The posterior of one adapter."""
        return self._source.posterior(adapter)

    def add(self, adapter: str, posterior: Posterior, active_adapters: list[str]) -> None:
        """Add the posterior of a new adapter; the caller decides which parameters are trainable."""
        self.adapters_added += 1
        self.bayeslora_posterior[adapter] = posterior.train(self.training)
        self._active_adapter = active_adapters

    @property
    def active(self) -> list[str]:
        """Names of the active adapters that have a posterior here."""
        return [name for name in self.active_adapters if name in self.bayeslora_posterior]

    @property
    def layer_names(self) -> list[str]:
        """The layers of the active adapters, by their paths from the base model."""
        return [layer.name for name in self.active for layer in self.posterior(name).layers]

    def draw_count(self, samples: int) -> int:
        """Number of draws for a prediction with a budget of ``samples``; 0 where all are equal and the mean suffices."""
        posteriors = map(self.posterior, self.active)
        return max((it.draw_count(samples) for it in posteriors if it.stochastic), default=0)

    def component_parameters(self) -> list[Tensor]:
        """Parameters of the components of the active adapter; with several adapters, draws have no component of their own."""
        return self.posterior(self.active[0]).component_parameters() if len(self.active) == 1 else []

    def split_kinds(self) -> Mapping[str, Literal["kl", "both"]]:
        """Kinds of parameters that plain SGD updates where training is split."""
        return {kind: along for name in self.active for kind, along in self.posterior(name).hints.split.items()}

    def kl(self) -> KL:
        """KL of the active adapters, at the draws of the last forward pass if there were any."""
        if not self.active:
            raise ValueError("there is no active adapter, hence no KL")
        self._reminder.used()
        found = [self.posterior(name).kl(self._last_draw(name), self.generator) for name in self.active]
        return reduce(KL.__add__, found)

    def kl_share(self, parts: int, draws: int = 1) -> float:
        """Factor of the KL in one of ``parts`` of a batch; see :meth:`Holder.kl_share`."""
        return float(draws) if any(self.posterior(name).amortised for name in self.active) else 1.0 / parts

    def penalty(self) -> Tensor | None:
        """Term that training adds to the loss of the active adapters besides the KL."""
        terms = [term for name in self.active if (term := self.posterior(name).penalty()) is not None]
        return torch.stack(terms).sum() if terms else None

    def after_step(self, step: int, steps: int) -> None:
        """Notify the active adapters of an optimiser step (see :meth:`Posterior.after_step`)."""
        for name in self.active:
            self.posterior(name).after_step(step, steps)

    def aim(self, losses: Iterable[Callable[[], Tensor]], add_up: AddUp | None = None) -> None:
        """Aim the active posteriors by the gradient of the losses at the mean; see :meth:`Holder.aim`."""
        aim(self, losses, add_up)

    def _last_draw(self, name: str) -> Factors | None:
        """The draws of the last pass, unless it used the mean or the posterior has changed since."""
        drawn = self._drawn.get(name)
        if drawn is None or drawn.factors.latents is None or not self._source.is_current(name, drawn):
            return None
        return drawn.factors

    # What a forward pass uses -------------------------------------------------------------------------------------

    def draw(
        self,
        n: int = 1,
        generator: torch.Generator | None = None,
        *,
        variates: Variates = "antithetic",
        layers: str = "all",
        fan_out: bool = False,
    ) -> None:
        """Draw ``n`` networks now and use them until another call changes that; see :meth:`Holder.draw`."""
        if self.merged:
            raise ValueError("the adapter is merged into the base weights; call unmerge_adapter() before drawing")
        if torch.is_grad_enabled():
            self._kept = {}
        drawn = {name: self._source.draw(name, n, generator or self.generator, variates) for name in self.active}
        self.use(drawn, layers=layers, fan_out=fan_out)

    def draw_from_seed(
        self, n: int, seed: int, *, variates: Variates = "antithetic", layers: str = "all", fan_out: bool = False
    ) -> None:
        """Draw with noise from a seed. Without gradients, such draws are cached until the adapter is trained again, so that
        successive predictions share the same networks."""
        if torch.is_grad_enabled():
            super().draw_from_seed(n, seed, variates=variates, layers=layers, fan_out=fan_out)
            return
        told = (n, seed, variates, layers, fan_out)
        key = (*told, tuple(self.active), self._source.precision, self.training, torch.is_inference_mode_enabled())
        kept = self._kept.pop(key, None)
        if kept is not None and not self.merged and self._all_current(kept):
            self._mode = kept
        else:
            super().draw_from_seed(n, seed, variates=variates, layers=layers, fan_out=fan_out)
        self._kept = dict([*self._kept.items(), (key, self._mode)][-KEPT:])

    def _all_current(self, mode: Mode) -> bool:
        return all(self._source.is_current(name, drawn) for name, drawn in mode.held.items())

    def use(self, factors: Mapping[str, Factors], *, layers: str = "all", fan_out: bool = False) -> None:
        """Use these factors of the active adapters, by name, until another call changes that; see :meth:`draw` for the rest.

        The layers get the given tensors themselves, so gradients with respect to them can be taken.
        """
        if self.merged:
            raise ValueError("the adapter is merged into the base weights; call unmerge_adapter() before using others")
        held = {name: self._source.wrap(name, given) for name, given in factors.items()}
        self._mode = Mode("draws", held, layers, fan_out)

    @property
    def fans_out(self) -> bool:
        """Whether the model itself repeats a batch, once for each of the draws in use."""
        return self._mode.fan_out

    @property
    def rows_returned(self) -> int:
        """Number of rows that the model returns for each row of a batch."""
        once = self.averages or self.merged or self.disable_adapters or not self._mode.fan_out
        return 1 if once else _draws_in(self._mode.held.values())

    def narrow(self, first: int, count: int) -> None:
        """Keep ``count`` of the draws in use, starting with number ``first``."""
        mode = self._mode
        held = {name: drawn.pick(first, count) for name, drawn in mode.held.items()}
        self._mode = Mode("draws", held, mode.layers, mode.fan_out)

    def deterministic(self) -> None:
        """Use the posterior mean until another call changes that, in training too."""
        self._mode = Mode("mean")

    def automatic(self) -> None:
        """Return to fresh draws in every pass of training and the mean in evaluation."""
        self._mode = Mode()

    def restoring(self) -> AbstractContextManager[None]:
        """Context manager that restores the current draws on exit."""
        return _Restoring(self, self._mode)

    @contextmanager
    def one_draw(self) -> Iterator[None]:
        """Inside the block, all passes of training share one draw, as the tokens of a text must."""
        with self.restoring():
            if self.training and self._mode.kind == "automatic" and not (self.merged or self.disable_adapters):
                with torch.no_grad():
                    self.use({name: self._one(name) for name in self.active})
            yield

    def _one(self, name: str) -> Factors:
        """One draw of an adapter in training."""
        fixed = name in self.fixed
        return self._source.mean(name).factors if fixed else self._source.draw(name, 1, self.generator, "independent")

    def seed(self, seed: int) -> None:
        """Draw from a separate generator with this seed from now on, instead of the global one."""
        self._source.seed(seed)

    def factors(self, adapter: str, layer: str) -> LayerFactors:
        """Factors of one layer for the current forward pass."""
        return self._of_this_pass(adapter).layers[layer]

    def inner(self, adapter: str, layer: str) -> Inner | None:
        """Computation of one layer before ``B`` in the current forward pass, if it is more than ``A x``."""
        return self._of_this_pass(adapter).inners.get(layer)

    def _of_this_pass(self, adapter: str) -> Draws:
        """The draws that were prepared for the pass; in a backward pass, which runs checkpointed layers again, of training."""
        if torch.compiler.is_compiling():
            return self._drawn[adapter]
        if in_backward():
            return self._learning.recall(adapter) or self._drawn[adapter]
        mode, training = self._prepared
        if mode is not self._mode or training != self.training or adapter not in self._drawn:
            if self.training or not (self._mode.settled or self._mode.layers == "all"):
                raise RuntimeError(
                    f"no factors were prepared for adapter {adapter!r}: call the whole model, not a part of it, or use draw()"
                )
            self._drawn[adapter] = self._factors_for(adapter)  # a part of the model was called by itself
        return self._drawn[adapter]

    def factors_in_use(self) -> dict[str, Factors]:
        """The factors that a forward pass uses now, by adapter, for passes that are replayed and never call a layer.

        As after a forward pass, :meth:`kl` is then that of these draws.
        """
        self._prepared = self._mode, self.training
        self._drawn.update({name: self._factors_for(name) for name in self.active})
        return {name: self._drawn[name].factors for name in self.active}

    def mean_update(self, adapter: str, layer: str) -> Tensor:
        """Mean of ``B A`` of one layer, ``[o, i]``, without the scaling."""
        with torch.no_grad():
            mean = self._source.mean(adapter).factors
        if mean.inners:
            raise ValueError(f"the update of adapter {adapter!r} depends on the input: there is no mean to merge")
        return mean.product(layer)[0]

    @contextmanager
    def mixed(self, adapter_names: list[str], *, training: bool) -> Iterator[None]:
        """Inside the block, prepare the means of these adapters: one per row of the batch, ``__base__`` for none."""
        if training:
            raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
        if self.merged:
            raise ValueError(
                "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
            )
        wanted = sorted(set(adapter_names) - {"__base__"})
        unknown = [name for name in wanted if name not in self.bayeslora_posterior]
        if unknown:
            raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}")
        self._mixed = wanted
        try:
            yield
        finally:
            self._mixed = None

    # Hooks on the root of the base model ----------------------------------------------------------------------------

    def before_forward(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare the factors of all active adapters."""
        self._bridge = None
        self._source.precision = getattr(root, "dtype", None)
        if self.disable_adapters and self.merged:
            self.unmerge()  # as the layers do
        if self.merged:
            self._require_no_training()
        if self.disable_adapters or self.merged:
            return None
        self.settle(root)
        self._prepare(args, kwargs)
        expansion, given = self._mode.expansion, None
        if expansion is not None and expansion.modules[0] is root:
            given = args, kwargs = expansion.enter(root, args, kwargs)
        if torch.is_grad_enabled() and self._needs_bridge(root):
            return self._build_bridge(root, args, kwargs) or given
        return given

    def after_forward(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note whose draws the output is of. Raise if nothing crossed the bridge, which would lose every gradient."""
        if self.training and torch.is_grad_enabled() and not in_backward():
            self._learning.end(output)
        if self._bridge is not None and not self._bridge.crossed:
            raise RuntimeError(
                "re-entrant gradient checkpointing needs the model's input embeddings or `inputs_embeds`, and neither was "
                "used; pass gradient_checkpointing_kwargs={'use_reentrant': False}"
            )

    def _require_no_training(self) -> None:
        """Refuse to train what no gradient reaches; the KL would be the whole objective."""
        if self.training and torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise ValueError(
                "the adapter is merged into the base weights and would not be trained; call unmerge_adapter() before training, "
                "or eval() to predict"
            )

    @torch.compiler.disable
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._rows = batch_rows(args, kwargs)
        self._prepared = self._mode, self.training
        for name in self.active if self._mixed is None else self._mixed:
            self._drawn[name] = self._factors_for(name)
        if in_backward():
            return  # the whole model is checkpointed and run again
        if self.training and torch.is_grad_enabled():
            self._learning.begin(self._of_active)
        else:
            self._learning.tidy()

    @property
    def _of_active(self) -> dict[str, Draws]:
        return {name: self._drawn[name] for name in self.active}

    @torch.compiler.disable
    def settle(self, root: nn.Module) -> None:
        """Apply ``layers`` and ``fan_out`` of the current draws; see :meth:`Holder.settle`."""
        mode = self._mode
        if mode.settled:
            return
        if mode.layers != "all":
            mode.held = {name: self._only_above(root, name, drawn, mode.layers) for name, drawn in mode.held.items()}
        if mode.fan_out:
            mode.expansion = self._make_expansion(root, list(mode.held.values()))
        mode.settled = True

    def _only_above(self, root: nn.Module, name: str, drawn: Draws, layers: str) -> Draws:
        """Keep the draws in the upper layers only, and use the mean below."""
        stack = Stack.find(root, drawn.layers)
        if stack is None:
            raise InputError(
                f"draw_layers is {layers!r}, but the adapted modules are not in one list of layers; use 'all'"
            )
        below = stack.below(layers, drawn.layers)
        with torch.no_grad():
            mean = self._source.mean(name)
        if mean.inners:
            raise InputError(
                f"the update of adapter {name!r} depends on the input, so its draws cannot begin at {layers}"
            )
        return replace(
            drawn,
            layers={layer: (mean if layer in below else drawn).layers[layer] for layer in drawn.layers},
            inners={layer: inner for layer, inner in drawn.inners.items() if layer not in below},
        )

    def _make_expansion(self, root: nn.Module, held: list[Draws]) -> DrawExpansion | None:
        """Where a batch is repeated for the draws, with hooks on the modules that it may enter there."""
        n = _draws_in(held)
        if n == 1:
            return None
        tried = partial(may_begin, root, self._trying, next(self.parameters()).device)
        expansion = DrawExpansion.before(root, [layer for drawn in held for layer in drawn.differing], n, tried)
        if expansion.modules[0] is not root:
            self._hook(expansion)
        return expansion

    def _hook(self, expansion: DrawExpansion) -> None:
        for module in expansion.modules:
            if not any(is_hook_of(self, hook) for hook in module._forward_pre_hooks.values()):
                module.register_forward_pre_hook(self._enter, with_kwargs=True)

    @contextmanager
    def _trying(self, expansion: DrawExpansion, ids: Tensor) -> Iterator[None]:
        """Inside the block, all layers use the mean, for these tokens, and the batch is repeated so."""
        self._hook(expansion)
        with self.restoring():
            self._mode = Mode("mean", expansion=expansion, settled=True)
            self._prepare((ids,), {})
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of every module at which a batch may be repeated."""
        expansion = self._mode.expansion
        return None if expansion is None or self.disable_adapters else expansion.enter(module, args, kwargs)

    def _factors_for(self, name: str) -> Draws:
        if self._mixed is not None:
            return self._source.mean(name)
        if self._mode.kind == "draws":
            return self._held(name)
        if self._mode.kind == "automatic" and self.training and name not in self.fixed:
            self._kept = {}
            waiting = None if torch.is_grad_enabled() else self._learning.waiting(name)
            if waiting is not None and self._rows % waiting.n == 0 and self._source.is_current(name, waiting):
                return waiting
            if torch.is_grad_enabled():
                self._reminder.trained(name, self.posterior(name))
            return self._source.wrap(name, self._source.draw(name, self._draws_of(name), self.generator, "independent"))
        return self._source.mean(name)

    def _draws_of(self, name: str) -> int:
        """Number of draws of a training pass: at most what the posterior recommends, and a divisor of the batch's rows."""
        most = min(self.posterior(name).hints.draws, self.most_draws or self._rows, self._rows)
        return max((n for n in range(1, most + 1) if self._rows % n == 0), default=1)

    def _held(self, name: str) -> Draws:
        held = self._mode.held.get(name)
        if held is None or not self._source.is_current(name, held):
            raise RuntimeError(
                f"the draws of adapter {name!r} are stale: it was loaded, moved, trained or activated since; call draw() again"
            )
        return held

    @property
    def generator(self) -> torch.Generator | None:
        """The separate generator of the draws in training; ``None`` without :meth:`seed`."""
        return self._source.generator

    # Re-entrant checkpointing ---------------------------------------------------------------------------------------

    def _needs_bridge(self, root: nn.Module) -> bool:
        return self.training and uses_reentrant_checkpointing(list(root.modules()))

    def _build_bridge(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the layers leaves, and let the first activation connect them to the draw."""
        self._bridge, crossing = Bridge.across(self._of_active)
        self._drawn.update(crossing)
        self._learning.begin(crossing)
        return self._bridge.hang(root, args, kwargs)

    # PEFT's interface of a tuner layer ------------------------------------------------------------------------------

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Record that the layers are merged; they merge themselves."""
        names = [n for n in (adapter_names or self.active) if n in self.bayeslora_posterior]
        self.merged_adapters = [*self.merged_adapters, *(n for n in names if n not in self.merged_adapters)]

    def unmerge(self) -> None:
        """Record that the layers are unmerged."""
        self.merged_adapters = []

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter and everything drawn from it."""
        super().delete_adapter(adapter_name)
        self._source.forget(adapter_name)
        self._learning = GradientDraws()
        for kept in (self._drawn, self._mode.held):
            kept.pop(adapter_name, None)
        self.fixed.discard(adapter_name)
        self._kept = {}


def _draws_in(held: Iterable[Draws]) -> int:
    """Number of draws that the adapters in use have; those without noise have one."""
    return max((drawn.n for drawn in held), default=1)


def find_holder(model: nn.Module) -> PosteriorHolder:
    """The holder of a model with our posteriors (see :func:`find_any_holder`)."""
    holder = find_any_holder(model)
    if not isinstance(holder, PosteriorHolder):
        raise ValueError("expected a model with a bayeslora adapter, found one of PEFT's own")
    return holder


class _Restoring(AbstractContextManager[None]):
    """A plain object and not a generator: without being entered, it changes nothing."""

    def __init__(self, holder: PosteriorHolder, mode: Mode) -> None:
        self._holder, self._mode = holder, mode

    def __exit__(self, *exc: object) -> None:
        self._holder._mode = self._mode


def is_hook_of(holder: PosteriorHolder, hook: Any) -> bool:
    """Whether a hook is a method of this holder."""
    return getattr(hook, "__self__", None) is holder
