"""The training loop: ELBO steps, evaluation, early stopping, checkpoints.

All randomness of a step (order of questions, draws, dropout) follows from the seed and the step's number alone. So an
interrupted run resumes from its checkpoint exactly as if it had not been interrupted.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from bayeslora.adapter.base import Holder, find_any_holder
from bayeslora.adapter.elbo import elbo
from bayeslora.adapter.holder import PosteriorHolder
from bayeslora.adapter.lean_layers import lean_layers
from bayeslora.posterior import IllConditionedError
from bayeslora.progress import Reporter, Silent
from bayeslora.runs.config import TrainingConfig
from bayeslora.train.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from bayeslora.train.components import ComponentLosses, component_figures, replace_failed
from bayeslora.train.errors import TrainingDiverged
from bayeslora.train.objective import KLWeight, Lesson, Objective
from bayeslora.train.optimise import rate_factor
from bayeslora.train.optimisers import make_steps
from bayeslora.train.order import order_of_epoch
from bayeslora.train.processes import Processes
from bayeslora.train.trackers import Log

T = TypeVar("T")


@dataclass(frozen=True)
class _Taken(Generic[Lesson]):
    """A completed step, with its figures still on the device.

    Attributes:
        step: its number, from 0.
        examples: of the batch.
        kl_weight: weight of the KL.
        learning_rate: of the first group of parameters.
        kl_terms: names of the terms of the KL.
        figures: norm of the gradient, sum of the losses, the whole objective, the terms of the KL, and losses by component.
    """

    step: int
    examples: Sequence[Lesson]
    kl_weight: float
    learning_rate: float
    kl_terms: tuple[str, ...]
    figures: Tensor


@dataclass
class Fit(Generic[Lesson]):
    """One training run.

    Args:
        objective: training objective, with the adapted model.
        examples: the training questions or texts.
        config: fully resolved settings.
        seed: of everything random.
        validate: evaluates the current model; must report ``nll``.
        checkpoint: file for the run's state; without one, nothing is saved.
        checkpoint_seconds: time between two checkpoints.
        run: identifies this run among others that may have left a checkpoint there.
        report: receives progress reports.
        log: receives the figures of every step.
        processes: the processes that train together.
    """

    objective: Objective[Lesson]
    examples: Sequence[Lesson]
    config: TrainingConfig
    seed: int
    validate: Callable[[], Mapping[str, float]]
    checkpoint: Path | None = None
    checkpoint_seconds: float = 60.0
    run: str = ""
    report: Reporter = field(default_factory=Silent)
    log: Log | None = None
    processes: Processes = field(default_factory=Processes)

    def __post_init__(self) -> None:
        self._model: nn.Module = self.objective.model
        self._device = next(self._model.parameters()).device
        self._holder: Holder = find_any_holder(self._model)
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        remembered = {f"remembered.{name}": buffer for name, buffer in self._holder.named_buffers()}
        self._state: dict[str, Tensor] = {**trained, **remembered}
        self._lean = lean_layers(self._model, self._device)
        self._steps = make_steps(self._model, self._given)
        self._rates = [group["lr"] for group in self._steps.groups]
        self._kl_weight = KLWeight(self._given("kl_scaling"), self._given("kl_beta"), self._given("kl_warmup"))
        self._batch_size: int = self._given("batch_size")
        self._epochs: int = self._given("epochs")
        self._draws: int = self._given("draws")
        self._mixture = self._holder.component_parameters()
        self._taken: _Taken[Lesson] | None = None
        self._order: tuple[int, Sequence[int]] | None = None
        self._kl: dict[str, float] = {}  # its terms and their weight, at the last step read
        # the examples may be too many for memory, so they are read once
        sizes = [
            (self.objective.terms(it), self.objective.length(it), self.objective.guess(it)) for it in self.examples
        ]
        self._terms: float = sum(terms for terms, *_ in sizes) / max(1, len(sizes))
        self._lengths = [length for _, length, _ in sizes]
        self._guess = sum(guess for *_, guess in sizes) / max(1, sum(terms for terms, *_ in sizes))

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps in one pass over the examples; the last batch may be small."""
        return math.ceil(len(self.examples) / self._batch_size)

    @property
    def steps(self) -> int:
        """Optimiser steps if training does not end early."""
        return self.steps_per_epoch * self._epochs

    def __call__(self) -> TrainingState:
        """Train to the end, resuming from the checkpoint if there is one. Leaves the model with the parameters to keep."""
        state = self._resume()
        clock, saved = time.monotonic() - state.seconds, time.monotonic()
        advance = self.report.stage("training")
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._holder.restoring():
            if state.step == 0:
                self._aim()
            while state.step < self.steps and not state.stopped:
                advance(state.step, self.steps)
                began = time.monotonic()
                self._step(state)
                state.step_seconds += time.monotonic() - began
                ended = state.step % self.steps_per_epoch == 0
                due = ended or time.monotonic() - saved >= self.checkpoint_seconds
                if due:
                    self._note_last(state)
                if ended:
                    self._restart_failed(state)
                    self._end_epoch(state)
                state.seconds = time.monotonic() - clock
                if due:
                    self._save(state)
                    saved = time.monotonic()
        advance(self.steps, self.steps)
        self._keep_best(state)
        self._model.eval()
        return state

    def _aim(self) -> None:
        """Aim the posterior in the directions in which the loss of the first batches falls fastest."""
        batches = range(min(self._given("aim"), self.steps_per_epoch))
        if not batches:
            return
        self._model.eval()
        self._holder.aim((loss for step in batches for loss in self._losses_of(step)), self.processes.add_up)

    def _losses_of(self, step: int) -> Iterator[Callable[[], Tensor]]:
        """The loss of this process's share of a batch, in parts that are computed one after another.

        In evaluation mode models keep all activations, so where a batch may not fit in memory, the parts are single examples.
        """
        mine, counts = self.processes.share(self._examples_of(step))
        size = 1 if self.config.gradient_checkpointing else self.config.micro_batch or len(mine)
        for pairs in _cut(list(zip(mine, counts, strict=True)), size):
            part = [example for example, _ in pairs]
            weights = [count for _, count in pairs]

            def loss(part: list[Lesson] = part, weights: list[float] = weights) -> Tensor:
                losses = self.objective.losses(part, 1)
                return (losses * losses.new_tensor(weights)).sum()

            yield loss

    # One step -----------------------------------------------------------------------------------------------------

    def _step(self, state: TrainingState) -> None:
        """Take a step, and read the figures of the one before: reading its own would make the host wait for it."""
        before, self._taken = self._taken, self._take_step(state.step)
        state.step += 1
        if before is not None:
            self._note(before, state)

    def _take_step(self, step: int) -> _Taken[Lesson]:
        with self._lean:
            return self._descend(step)

    def _descend(self, step: int) -> _Taken[Lesson]:
        self._model.train()
        weight = self._kl_weight.at(
            step, self.steps, examples=len(self.examples), batch_size=self._batch_size, terms=self._terms
        )
        examples = self._examples_of(step)
        mine, counts = self.processes.share(examples)
        parts = list(_cut(list(zip(mine, counts, strict=True)), self.config.micro_batch or len(mine)))
        shares = len(parts) * self.processes.count
        self._set_rates(step)
        self._steps.zero_grad()
        figures = []
        for index, pairs in enumerate(parts):
            part = [example for example, _ in pairs]
            noise = torch.Generator().manual_seed(_mix(self.seed, step, index))
            # dropout must neither repeat the noise of the draws nor be the same in all processes
            torch.manual_seed(_mix(self.seed, step, index, 1 + self.processes.rank))
            try:
                self._holder.draw(draws := min(self._draws, len(part)), noise)
            except IllConditionedError as error:
                raise self._diverged(str(error), step, part) from error
            losses = self.objective.losses(part, draws)
            if not all(count for _, count in pairs):
                losses = losses * losses.new_tensor([count for _, count in pairs])
            # divide by the average number of terms of a batch of this size, so that every term of the data weighs the same
            loss = losses.sum() / (len(examples) * self._terms)
            bound = elbo(self._holder, loss, weight, parts=shares, draws=draws)
            self._steps.backward(bound.loss, bound.weighted_kl)
            kl_terms = {name: bound.share * term for name, term in bound.kl.terms.items()}
            told = torch.stack([it.detach().float() for it in (losses.sum(), bound.total, *kl_terms.values())])
            figures.append(torch.cat([told, *self._by_component(losses, pairs, draws)]))
        told_by_all = torch.stack(figures).sum(0)
        self.processes.add_up([*self._steps.gradients(), told_by_all])
        norm = self._steps.step()
        self._holder.after_step(step + 1, self.steps)
        rate = self._steps.groups[0]["lr"]
        return _Taken(step, examples, weight, rate, tuple(kl_terms), torch.cat([norm.detach().view(1), told_by_all]))

    def _by_component(self, losses: Tensor, pairs: Sequence[tuple[Lesson, float]], draws: int) -> list[Tensor]:
        """Losses of a part of a batch by component, if there are several."""
        if not self._mixture:
            return []
        terms, counts = [self.objective.terms(it) for it, _ in pairs], [count for _, count in pairs]
        return [component_figures(losses, terms, counts, draws, self._mixture[0].shape[1])]

    def _note(self, taken: _Taken[Lesson], state: TrainingState) -> None:
        """Record the figures of a step; here the host waits until it is done."""
        norm, nll, loss, *rest = taken.figures.tolist()
        kl = dict(zip(taken.kl_terms, rest, strict=False))
        state.components.add(rest[len(kl) :])
        for value in (loss, norm):
            if not math.isfinite(value):
                raise self._diverged(f"the loss or its gradient is {value}", taken.step, taken.examples)
        total, count = state.train_nll
        terms = sum(map(self.objective.terms, taken.examples))
        state.train_nll = (total + nll, count + terms)
        if taken.step == 0:
            state.untrained_nll = nll / terms
        self._kl = {**kl, "weight": taken.kl_weight}
        if self.log is not None:
            figures = {"nll": nll / terms, **{f"kl_{name}": value for name, value in kl.items()}}
            figures |= {"kl_weight": taken.kl_weight, "learning_rate": taken.learning_rate}
            self.log({f"train/{name}": value for name, value in figures.items()}, taken.step + 1)

    def _note_last(self, state: TrainingState) -> None:
        """Record the figures of the last step, if not done yet."""
        if self._taken is not None:
            taken, self._taken = self._taken, None
            self._note(taken, state)

    def _examples_of(self, step: int) -> list[Lesson]:
        """The batch of a step; every epoch has its own order."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self._batch_size
        return [self.examples[row] for row in self._order_of(epoch)[start : start + self._batch_size]]

    def _order_of(self, epoch: int) -> Sequence[int]:
        """The order of the examples in an epoch; that of the last one asked for is kept."""
        if self._order is None or self._order[0] != epoch:
            source = random.Random(f"{self.seed} {epoch}")
            self._order = (epoch, order_of_epoch(self._lengths, self._batch_size, source))
        return self._order[1]

    def _set_rates(self, step: int) -> None:
        factor = rate_factor(
            self._given("schedule"),
            step,
            steps=self.steps,
            steps_per_epoch=self.steps_per_epoch,
            warmup=self._given("warmup"),
            milestones=self._given("milestones"),
            cycles=self._given("cycles"),
        )
        for group, rate in zip(self._steps.groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def _diverged(self, what: str, step: int, examples: Sequence[Lesson]) -> TrainingDiverged:
        names = ", ".join(example.id for example in examples[:3])
        saved = self.checkpoint is not None and self.checkpoint.exists()
        kept = f"the last good state is kept in {self.checkpoint}; " if saved else ""
        return TrainingDiverged(
            f"{what} at step {step + 1} of {self.steps} "
            f"(epoch {step // self.steps_per_epoch + 1}, questions {names}, ...); {kept}"
            "try a lower learning rate"
        )

    # Evaluation -----------------------------------------------------------------------------------------------------

    def _end_epoch(self, state: TrainingState) -> None:
        epoch = state.step // self.steps_per_epoch
        total, count = state.train_nll
        state.train_nll = (0.0, 0)
        if epoch % self._given("eval_every") and epoch != self._epochs:
            return
        try:
            metrics = self._validate()
        except ArithmeticError as error:
            raise TrainingDiverged(f"evaluation after step {state.step} of {self.steps}: {error}") from error
        learnt = {"epoch": epoch, "step": state.step, "train_nll": total / count, "kl": self._kl}
        restarted, state.restarted = state.restarted, []
        state.history.append({**learnt, "validation": metrics, **({"restarted": restarted} if restarted else {})})
        self.report.say(
            f"epoch {epoch}/{self._epochs}: train nll {total / count:.4f}, validation "
            + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        )
        if self.log is not None:
            self.log({f"validation/{name}": value for name, value in metrics.items()}, state.step)
        self._note_best(state, metrics["nll"])

    def _restart_failed(self, state: TrainingState) -> None:
        """Let components that have learnt nothing in this epoch go on as copies of the best."""
        means, state.components = state.components.means(), ComponentLosses()
        epoch = state.step // self.steps_per_epoch
        for it in replace_failed(self._mixture, self._steps.optimiser, means, min(state.untrained_nll, self._guess)):
            restarted = {"epoch": epoch, "component": it.component, "from": it.source, "train_nll": means}
            state.restarted.append(restarted)
            self.report.say(f"epoch {epoch}/{self._epochs}: {it}")

    def _validate(self) -> dict[str, float]:
        """Evaluate in all processes, as sharded layers require, and use the figures of one: others may differ by rounding."""
        found = dict(self.validate())
        return self.processes.agree(lambda: found)

    def _note_best(self, state: TrainingState, nll: float) -> None:
        if self._given("patience") == 0:
            return
        if state.best_nll is None or nll < state.best_nll:
            state.best_nll, state.waited = nll, 0
            state.best = {name: tensor.detach().cpu().clone() for name, tensor in self._state.items()}
            return
        state.waited += 1
        state.stopped = state.waited >= self._given("patience")
        if state.stopped:
            self.report.say(f"validation nll has not fallen for {state.waited} evaluations: training ends early")

    @torch.no_grad()
    def _keep_best(self, state: TrainingState) -> None:
        for name, value in state.best.items():
            self._state[name].copy_(value)
        holder = self._holder
        if (
            state.best
            and isinstance(holder, PosteriorHolder)
            and any(holder.posterior(it).empty for it in holder.active)
        ):
            self.report.say(
                "the best state is from before anything was collected to draw from, so all draws are equal; train with "
                "patience 0"
            )

    # State ----------------------------------------------------------------------------------------------------------

    def _resume(self) -> TrainingState:
        if self.checkpoint is None or not self.processes.agree(self.checkpoint.exists):
            return TrainingState()
        state = load_checkpoint(self.checkpoint, self._state, self._steps.optimiser, self.run)
        self.report.say(f"going on from step {state.step} of {self.steps}")
        return state

    def _save(self, state: TrainingState) -> None:
        if self.checkpoint is not None and self.processes.main:
            if not all(bool(torch.isfinite(p).all()) for p in self._state.values()):
                raise TrainingDiverged(
                    f"a parameter is no longer finite after step {state.step} of {self.steps}; try a lower learning rate"
                )
            save_checkpoint(self.checkpoint, state, self._state, self._steps.optimiser, self.run)

    def _given(self, name: str) -> Any:
        value = getattr(self.config, name)
        if value is None:
            raise ValueError(f"training setting {name!r} is open; use bayeslora.train.resolve(config) first")
        return value


def _cut(sequence: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(sequence), size):
        yield sequence[start : start + size]


def _mix(*numbers: int) -> int:
    """One seed from several numbers, different for each tuple of them."""
    return random.Random(repr(numbers)).getrandbits(63)
