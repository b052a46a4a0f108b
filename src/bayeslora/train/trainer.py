"""The ELBO inside transformers' ``Trainer``: every optimiser step has the share of the KL that belongs to its examples.

Adding it to the loss would be wrong. The trainer's loss is a mean over tokens, each of which counts in the evidence. The
trainer sums over the micro-batches of an accumulated step, and divides by their number only a loss that the model has not
normalised already; the gradient exchange averages over processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from bayeslora.adapter.base import ATTRIBUTE
from bayeslora.adapter.config import BayesLoraConfig
from bayeslora.adapter.elbo import IGNORED, Elbo, elbo, labels_per_example
from bayeslora.adapter.holder import find_holder
from bayeslora.adapter.layer import BayesLoraLinear
from bayeslora.adapter.lean_layers import lean_layers
from bayeslora.adapter.version_counters import raise_versions
from bayeslora.posterior.base import HALF
from bayeslora.posterior.ivon import IvonPosterior
from bayeslora.posterior.kl import KLScaling
from bayeslora.posterior.laplace import LaplacePosterior
from bayeslora.posterior.tfb import TfbPosterior
from bayeslora.train.batches import split_rows
from bayeslora.train.component_callback import ReplaceFailedComponents
from bayeslora.train.objective import KLWeight
from bayeslora.train.optimise import clip_scales, multiplier_of, parameter_groups, parameter_kinds
from bayeslora.train.processes import Processes
from bayeslora.train.unsaved_state import load_unsaved_state, save_unsaved_state

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


REFERENCE = "ref"
"""Name of the copy that TRL makes of a trained adapter, to compare with."""


class BayesLoraTrainerMixin(_Base):
    """``class MyTrainer(BayesLoraTrainerMixin, Trainer)``: likelihood plus KL, logged separately.

    Works with the trainers of TRL in place of ``Trainer`` too. TRL multiplies by the output head's weight itself, which would
    bypass an adapter on the head: the loss of its ``SFTTrainer`` is then that of ``Trainer``, from logits, and its other
    trainers refuse such adapters.

    Attributes:
        kl_scaling: ``elbo``, ``paper`` or ``blob``, see :func:`bayeslora.posterior.kl_weight`.
        kl_beta: multiplier of the KL's weight.
        kl_warmup: share of the steps in which the KL's weight rises from zero.
        rate_multipliers: learning rates of kinds of parameters relative to ``args.learning_rate``; by default those that
            the posterior recommends.
        aim: number of batches whose gradient sets the initial directions of posteriors that support it. None are used where
            parameters are sharded (FSDP, DeepSpeed).
    """

    kl_scaling: KLScaling = "elbo"
    kl_beta: float = 1.0
    kl_warmup: float = 0.0
    rate_multipliers: Mapping[str, float] | None = None
    aim: int = 4

    def __init__(self, model: Any = None, *args: Any, peft_config: Any = None, **kwargs: Any) -> None:
        if peft_config is not None and model is None:
            raise ValueError(
                "peft_config needs a model to adapt: give one, or let model_init return get_peft_model(model, peft_config)"
            )
        if peft_config is not None and isinstance(model, PeftModel):
            raise ValueError(
                "the model has an adapter already: leave peft_config out to train that one, or call merge_and_unload() first"
            )
        if isinstance(model, str) and not self._is_of_trl:
            raise ValueError(
                f"model is the name {model!r}, which transformers' Trainer does not load: give "
                f"AutoModelForCausalLM.from_pretrained({model!r}), or use BayesLoraSFTTrainer, which takes names"
            )
        own_reference = REFERENCE in getattr(model, "peft_config", {})
        if isinstance(peft_config, BayesLoraConfig) and self._adapts(model, super().__init__):
            model, peft_config = get_peft_model(model, peft_config), None
        if peft_config is not None:
            kwargs["peft_config"] = peft_config
        with _hidden_head(model) if self._is_sft else nullcontext():
            super().__init__(model, *args, **kwargs)
        if not own_reference:
            _fix_reference(self.model)
        restore_full_precision(self.model)
        if (
            self._is_of_trl and not self._is_sft
        ):  # chosen and rejected texts, say, have to be predicted by the same network
            find_holder(self.model).most_draws = 1
        _require_gradients_of_adam(self.model)
        _require_own_loss(self.model, self.args)
        self.add_callback(_Steps())
        self.add_callback(_Start(self._aim))
        self.add_callback(ReplaceFailedComponents(self))
        self._kl_logs: dict[str, list[Tensor]] = {}
        self._examples: Tensor | int | None = None

    def _adapts(self, model: Any, start: Callable[..., None]) -> bool:
        """Whether the adapter is made here, so that its head can be hidden from TRL, or as the trainer does not make one.

        Other trainers of TRL make it themselves: they take a given adapter for one that is trained already, and would compare
        with draws from a copy of it in place of the base model.
        """
        makes_one = "peft_config" in signature(start).parameters
        return not isinstance(model, str) and (not makes_one or self._is_sft)

    @property
    def _is_of_trl(self) -> bool:
        """Whether this is a trainer of TRL; they load a model by its name."""
        return any(kind.__module__.startswith("trl.") for kind in type(self).__mro__)

    @property
    def _is_sft(self) -> bool:
        """Whether this is TRL's ``SFTTrainer``."""
        return any(kind.__name__ == "SFTTrainer" for kind in type(self).__mro__)

    @property
    def kl_weight(self) -> float:
        """Weight of the KL beside a mean over examples. Beside one over tokens, ``elbo`` divides it by the tokens per example."""
        if not hasattr(self.train_dataset, "__len__"):
            raise ValueError(
                "the KL's weight needs the number of training examples: give a train_dataset with a length"
            )
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        weight = KLWeight(self.kl_scaling, self.kl_beta, self.kl_warmup)
        step, steps = self.state.global_step, self.state.max_steps
        return weight.at(step, steps, examples=len(self.train_dataset), batch_size=batch)

    @property
    def _lean(self) -> AbstractContextManager[None]:
        """Leaner layers; found once for every model, of which ``model_init`` makes several."""
        if getattr(self, "_found_lean", (None,))[0] is not self.model:
            self._found_lean = self.model, lean_layers(self.model, self.args.device)
        return self._found_lean[1]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The trainer's own loss, plus the KL at the same draw in training, less what of it no parameter changes."""
        labels = inputs.get("labels")  # the trainer removes them where it smooths labels
        if _adapted_head(self.model) is None or not self._is_sft:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        else:
            result = Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        if not self.model.training:
            return result
        loss, outputs = result if return_outputs else (result, None)
        loss = _counted(loss, labels)
        parts = self._micro_batches(num_items_in_batch)
        weight = self.kl_weight / self._terms(labels, num_items_in_batch)
        # a KL that is a sum over the examples of a part is not to be divided where the trainer divides everything
        divided = self.current_gradient_accumulation_steps // parts
        bound = elbo(find_holder(self.model), loss, weight, parts=parts, draws=divided)
        self._note(bound, loss, parts)
        return (bound.learnt, outputs) if return_outputs else bound.learnt

    def _aim(self) -> None:
        """Aim the posterior by the gradient of the first batches, without other side effects."""
        if self.aim == 0 or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        training, metrics = self.model.training, copy.deepcopy(getattr(self, "_metrics", None))
        self.model.eval()
        with torch.random.fork_rng(devices):
            prepared = self.get_train_dataloader()
            loader = getattr(prepared, "base_dataloader", prepared)  # or accelerate counts these batches as training
            batches = map(self._prepare_inputs, islice(loader, self.aim))
            # in evaluation mode a model keeps all activations: where a batch may not fit, its rows are run one by one, unless
            # they belong together, as chosen and rejected texts do
            small = self.args.gradient_checkpointing
            inputs = (part for it in batches for part in (split_rows(it, 1) if small and "labels" in it else [it]))
            processes = Processes(self.args.process_index, self.args.world_size)
            find_holder(self.model).aim((partial(self.compute_loss, self.model, it) for it in inputs), processes.add_up)
        self.model.train(training)
        if metrics is not None:
            self._metrics = metrics  # TRL's, of evaluation

    def _terms(self, labels: Tensor | None, num_items_in_batch: Tensor | int | None) -> Tensor | float:
        """Labels per example over which the loss is a mean: those of the whole step if the trainer has counted them."""
        if self.kl_scaling != "elbo" or labels is None:
            return 1.0
        if num_items_in_batch is None:
            return labels_per_example(labels)
        processes = self.args.world_size if self.args.average_tokens_across_devices else 1
        full = self.args.train_batch_size * self.current_gradient_accumulation_steps * processes
        examples = full if self._examples is None else self._examples
        return torch.as_tensor(num_items_in_batch).clamp(min=1) / examples

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """The batches of a step as the trainer collects them, counting their rows: the last step of an epoch may have fewer.

        Labels of whole examples are not counted: many models ignore their number, so the trainer has to divide the loss.
        """
        batches, items = super().get_batch_samples(*args, **kwargs)
        if self.compute_loss_func is None and any(map(_labels_examples, batches)):
            items = None
        self._examples = sum(map(self._rows, batches))
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            self._examples = self.accelerator.gather(torch.tensor(self._examples, device=self.args.device)).sum()
        return batches, items

    def _rows(self, batch: Any) -> int:
        """Number of examples in a batch; that of a full one where they are joined into one row, or none can be counted."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if labels is None or (len(labels) == 1 and "position_ids" in batch):
            return int(self.args.train_batch_size)
        return len(labels)

    def _micro_batches(self, num_items_in_batch: Tensor | int | None) -> int:
        """Divisor of the KL; 1 where the trainer divides the loss itself, which it does unless that is normalised already."""
        normalised = getattr(self, "loss_is_scaled_for_ga", None)  # transformers before 5.20 has no such switch
        if normalised is None:
            by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            normalised = by_model or self.compute_loss_func is not None
        return self.current_gradient_accumulation_steps if normalised else 1

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Clip the gradient of posterior scales before the trainer clips everything by one norm, for the reason that
        :func:`bayeslora.train.optimise.clip_apart` gives."""
        with self._lean:
            loss: Tensor = super().training_step(*args, **kwargs)
        if self.args.max_grad_norm and self.accelerator.sync_gradients and not self.args.fp16:
            clip_scales(parameter_groups(self.model), self.args.max_grad_norm)
        return loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the trainer's optimiser, with a group for each kind of the posterior's parameters."""
        fresh = self.optimizer is None
        optimiser: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        if fresh:
            kinds = parameter_kinds(self.model)
            named = {id(p): name for name, p in self.model.named_parameters() if name in kinds}
            kind_of = {key: (kinds[name], self._multiplier(name, kinds[name])) for key, name in named.items()}
            optimiser.param_groups[:] = [
                {**group, "params": members, "lr": group["lr"] * rate, "multiplier": rate}
                for group in optimiser.param_groups
                for kind, rate in dict.fromkeys(kind_of.values())
                if (members := [p for p in group["params"] if kind_of[id(p)] == (kind, rate)])
            ]
        return optimiser

    def _multiplier(self, name: str, kind: str) -> float:
        """Learning rate of a parameter relative to the trainer's, by default what the posterior of its adapter recommends."""
        if self.rate_multipliers is not None:
            return multiplier_of(kind, self.rate_multipliers)
        holder = find_holder(self.model)
        own = [it for it in holder.active if f"{ATTRIBUTE}.bayeslora_posterior.{it}." in name]
        return multiplier_of(kind, holder.posterior((own or holder.active)[0]).hints.rate_multipliers)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Exclude all but point estimates from weight decay, which would work against the KL on scales."""
        kinds = parameter_kinds(model)
        return [
            name
            for name in super().get_decay_parameter_names(model)
            if kinds.get(name, "weights").startswith("weights")
        ]

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the state of random numbers, and with it what of a posterior's training its file does not have."""
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            save_unsaved_state(find_holder(self.model), Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore the optimiser where training goes on from a checkpoint, and what of the posterior is not in its file."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_unsaved_state(find_holder(self.model), Path(checkpoint))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Put the likelihood and the KL as it is weighted first, both averaged since the last report; then what the trainer
        reports, with the learning rate that was set, and the terms of the KL."""
        found: dict[str, float] = {}
        if "loss" in logs:  # of training, and not of an evaluation
            found, self._kl_logs = {name: float(torch.stack(it).mean()) for name, it in self._kl_logs.items()}, {}
        first: dict[str, float] = {name: found.pop(name) for name in ("nll", "kl_weighted") if name in found}
        if "learning_rate" in logs and self.optimizer is not None:
            logs["learning_rate"] /= self.optimizer.param_groups[0].get("multiplier", 1.0) or 1.0
        super().log(first | logs | found, *args, **kwargs)

    def _note(self, bound: Elbo, loss: Tensor, parts: int) -> None:
        """Record the figures of a micro-batch, one of ``parts`` whose losses are summed."""
        figures: dict[str, Tensor] = {"nll": loss * parts, "kl_weighted": bound.weighted_learnt_kl * parts}
        figures |= {f"kl_{term}": value for term, value in bound.kl.terms.items()}
        for name, value in figures.items():
            self._kl_logs.setdefault(name, []).append(value.detach().float())


def _fix_reference(model: nn.Module) -> None:
    """Make the copy of a trained adapter, if TRL has made one, the mean of that adapter. TRL does not copy buffers."""
    holder = find_holder(model)
    if REFERENCE in holder.bayeslora_posterior:
        holder.posterior(REFERENCE).load_state_dict(holder.posterior("default").state_dict())
        holder.fixed.add(REFERENCE)


def _require_gradients_of_adam(model: nn.Module) -> None:
    """Refuse a posterior whose widths only its own optimiser may update, or that is fitted to a LoRA after its training."""
    holder = find_holder(model)
    for posterior in map(holder.posterior, holder.active):
        if isinstance(posterior, IvonPosterior):
            raise ValueError("posterior 'ivon' is trained by steps of its own; use bayeslora train --method ivon")
        if isinstance(posterior, (LaplacePosterior, TfbPosterior)):
            raise ValueError(
                f"posterior {posterior.name!r} is fitted to a trained LoRA and learns nothing here; train posterior 'point', "
                f"and then use bayeslora train --method {posterior.name} --start-from ADAPTER"
            )


def _require_own_loss(model: nn.Module, args: Any) -> None:
    """Refuse another loss of TRL where that of ``Trainer`` takes its place."""
    given = getattr(args, "loss_type", None)
    if given == "dft" and _adapted_head(model) is not None:
        raise ValueError(
            f"loss_type is {given!r}, which TRL does not compute with an adapter on the output head; leave lm_head out of "
            "target_modules, or use loss_type='nll'"
        )


def _counted(loss: Tensor, labels: Tensor | None) -> Tensor:
    """The loss, or zero where no label counts: the mean over no labels is NaN, and would spread to every parameter."""
    if labels is None:
        return loss
    return torch.where((labels.to(loss.device) != IGNORED).any(), loss, torch.zeros_like(loss))


def _labels_examples(batch: Any) -> bool:
    """Whether the labels of a batch are classes or numbers of whole examples, and not tokens."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return isinstance(labels, Tensor) and (labels.ndim == 1 or labels.is_floating_point())


class _Steps(TrainerCallback):
    """Checks that posteriors can be trained, and calls them after every optimiser step, before gradients are cleared."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                "no parameter of the model is trained: load the adapter with PeftModel.from_pretrained(..., is_trainable=True), "
                "or set inference_mode=False"
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        found = {parameter.dtype for parameter in find_holder(model).parameters()} & HALF
        if found:
            raise ValueError(
                f"the posterior was cast to {found.pop()}, in which its steps are lost; DeepSpeed does that with bf16 or fp16: "
                "load the base model with dtype=torch.bfloat16 and use mixed_precision: 'no' (configs/deepspeed-zero2.yaml)"
            )

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        holder = find_holder(model)
        raise_versions(holder.parameters())  # DeepSpeed's optimisers are not torch's
        holder.after_step(state.global_step + 1, state.max_steps)


class _Start(TrainerCallback):
    """Calls a function before the first step, unless training resumes from a checkpoint."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._act()


class BayesLoraTrainer(BayesLoraTrainerMixin, Trainer):
    """transformers' ``Trainer`` that maximises the ELBO."""


def _adapted_head(model: nn.Module) -> BayesLoraLinear | None:
    """The output head, if it has one of our adapters."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    return head if isinstance(head, BayesLoraLinear) else None


@contextmanager
def _hidden_head(model: Any) -> Iterator[None]:
    """Make an adapted output head look like a plain one inside the block; TRL refuses to start otherwise."""
    head = _adapted_head(model) if isinstance(model, PeftModel) else None
    if head is None:
        yield
        return
    base = model.get_base_model()
    base.get_output_embeddings = head.get_base_layer
    try:
        yield
    finally:
        del base.get_output_embeddings


def restore_full_precision(model: nn.Module) -> None:
    """Cast posteriors back to float32, in place.

    Some trainers cast every trainable parameter to bfloat16, whose rounding swallows a usual step of a scale's logit.
    """
    for parameter in find_holder(model).parameters():
        if parameter.dtype in HALF:
            parameter.data = parameter.data.float()
