"""Components of a mixture that have learnt nothing, in the trainers of transformers and TRL (see
:mod:`bayeslora.train.components`).

The loss of these trainers is a mean over a batch, which does not show that one component is lost. So each component predicts
some training examples by itself after every epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import Trainer, TrainerCallback

from bayeslora.adapter.elbo import IGNORED
from bayeslora.adapter.holder import PosteriorHolder, find_holder
from bayeslora.adapter.sampling import evaluating
from bayeslora.train.batches import predicts_next_tokens, rows_at_once, split_rows
from bayeslora.train.components import FEWEST, replace_failed
from bayeslora.train.processes import Processes

ENOUGH = 1000
"""Labels of the examples that each process looks at; no more are needed to see a loss of twice the others'."""

STRIDE = 13
"""The examples are taken in this stride, so that the first of them are spread over the training set as well."""

log = logging.getLogger("bayeslora.train")


class ReplaceFailedComponents(TrainerCallback):
    """Lets components of a causal language model that have learnt nothing go on as copies of the best, and warns of it.

    Does nothing for other models, and where parameters are sharded (FSDP, DeepSpeed).

    Args:
        trainer: has the model and the training examples.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Look for such components after the last step of an epoch, and replace them; the trainer saves after that."""
        if abs(state.epoch - round(state.epoch)) > 1e-6:
            return
        parameters = find_holder(self._trainer.model).component_parameters()
        sharded = self._trainer.is_fsdp_enabled or self._trainer.is_deepspeed_enabled
        if not parameters or sharded or not predicts_next_tokens(self._trainer.model):
            return
        devices = [args.device] if args.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            untrained, *means = self._losses(components=parameters[0].shape[1], seed=state.global_step) or [0.0]
        for it in replace_failed(parameters, optimizer, means, untrained):
            if state.is_world_process_zero:
                log.warning("epoch %g: %s", state.epoch, it)

    @torch.no_grad()
    def _losses(self, components: int, seed: int) -> list[float]:
        """Mean loss per label of the base model and of each component; empty if there are no labels of tokens."""
        trainer, model = self._trainer, self._trainer.model
        holder = find_holder(model)
        sums = torch.zeros(2, 1 + components, device=trainer.args.device)
        with evaluating(model), holder.restoring():
            holder.train()  # or a posterior with snapshots would draw from these
            holder.draw(components, torch.Generator().manual_seed(seed))  # one of each
            holder.eval()
            for inputs in self._examples():
                if sums[1, 0] >= ENOUGH:
                    continue
                with _base_alone(holder), trainer.compute_loss_context_manager():
                    sums[:, 0] += _loss_and_labels(model, inputs)
                for k in range(components):
                    with holder.restoring(), trainer.compute_loss_context_manager():
                        holder.narrow(k, 1)
                        sums[:, 1 + k] += _loss_and_labels(model, inputs)
        Processes(trainer.args.process_index, trainer.args.world_size).add_up([sums])
        total, labels = sums.tolist()
        return [a / b for a, b in zip(total, labels, strict=True)] if all(labels) else []

    def _examples(self) -> Iterator[dict[str, Any]]:
        """Some training examples from all over the training set, in batches; none if labels are not those of tokens."""
        data: Any = self._trainer.train_dataset
        spread = [STRIDE * k % FEWEST * len(data) // FEWEST for k in range(FEWEST)]
        rows = spread if len(data) > FEWEST else range(len(data))
        chosen = data.select(rows) if hasattr(data, "select") else Subset(data, rows)
        for batch in self._trainer.get_test_dataloader(chosen):  # to its end, or accelerate counts it as in use
            if _labels_tokens(batch):  # or TRL may write texts to prepare it
                inputs = self._trainer._prepare_inputs(batch)
                yield from split_rows(inputs, rows_at_once(self._trainer, inputs))


@contextmanager
def _base_alone(holder: PosteriorHolder) -> Iterator[None]:
    """Disable the adapters inside the block. PEFT's own way of it also changes which parameters are trained."""
    holder._disable_adapters, before = True, holder._disable_adapters
    try:
        yield
    finally:
        holder._disable_adapters = before


def _labels_tokens(batch: Any) -> bool:
    """Whether a batch has a label for each of its tokens."""
    found = [batch.get(name) if isinstance(batch, Mapping) else None for name in ("labels", "input_ids")]
    labels, ids = (getattr(it, "shape", None) for it in found)
    return ids is not None and labels == ids


def _loss_and_labels(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Sum of the losses of the next tokens, and their number, ``[2]``."""
    given = {name: value for name, value in inputs.items() if name != "labels"}
    logits = model(**given, use_cache=False).logits
    wanted = inputs["labels"][:, 1:]
    counted = wanted != IGNORED
    losses = F.cross_entropy(logits[:, :-1][counted].float(), wanted[counted], reduction="sum")
    return torch.stack([losses, counted.sum().to(losses)])
