"""The ELBO inside transformers' ``Trainer``: the KL enters every optimiser step with a weight of exactly one ``kl_weight``.

That is not what adding it to the loss gives. The trainer sums over the micro-batches of an accumulated step, and divides
by their number only a loss that the model has not normalised already; averaging over processes is done by the gradient
exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from bayeslora.adapter.holder import ATTRIBUTE, find_holder
from bayeslora.posterior.kl import KL, KLScaling, kl_weight

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class BayesLoraTrainerMixin(_Base):
    """``class MyTrainer(BayesLoraTrainerMixin, Trainer)``: likelihood plus KL, logged apart.

    Attributes:
        kl_scaling: ``elbo`` (``beta / N``) or ``paper`` (``0.2 / steps per epoch``).
        kl_beta: multiplier of the KL's weight.
    """

    kl_scaling: KLScaling = "elbo"
    kl_beta: float = 1.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        restore_full_precision(self.model)
        self._kl_logs: dict[str, list[Tensor]] = {}

    @property
    def kl_weight(self) -> float:
        """Weight of the KL beside the mean loss, from the number of training examples."""
        if not hasattr(self.train_dataset, "__len__"):
            raise ValueError(
                "the KL's weight needs the number of training examples: give a train_dataset with a length"
            )
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return kl_weight(self.kl_scaling, examples=len(self.train_dataset), batch_size=batch, beta=self.kl_beta)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The trainer's own loss, and in training the KL at the same draw."""
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not self.model.training:
            return result
        loss, outputs = result if return_outputs else (result, None)
        kl = find_holder(self.model).kl()
        self._note(loss, kl)
        loss = loss + self.kl_weight * kl.total / self._micro_batches(num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _micro_batches(self, num_items_in_batch: Tensor | int | None) -> int:
        """By how much the KL must be divided here: the trainer does it itself unless the loss is normalised already."""
        normalised = getattr(self, "loss_is_scaled_for_ga", None)  # transformers before 5.20 has no such switch
        if normalised is None:
            by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            normalised = by_model or self.compute_loss_func is not None
        return self.current_gradient_accumulation_steps if normalised else 1

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """No weight decay on the posterior: it would pull scales away from what the KL asks for."""
        return [name for name in super().get_decay_parameter_names(model) if f"{ATTRIBUTE}." not in name]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the likelihood and both KLs, averaged since the last report."""
        for name, values in self._kl_logs.items():
            logs[name] = torch.stack(values).mean().item()
        self._kl_logs = {}
        super().log(logs, *args, **kwargs)

    def _note(self, loss: Tensor, kl: KL) -> None:
        for name, value in (("nll", loss), ("kl_inducing", kl.inducing), ("kl_conditional", kl.conditional)):
            self._kl_logs.setdefault(name, []).append(value.detach().float())


class BayesLoraTrainer(BayesLoraTrainerMixin, Trainer):
    """transformers' ``Trainer`` that maximises the ELBO."""


def restore_full_precision(model: nn.Module) -> None:
    """Bring posteriors back to float32, in place.

    Some trainers cast every trainable parameter to bfloat16, in which a step of usual size is lost on a scale's logit.
    """
    for parameter in find_holder(model).parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
