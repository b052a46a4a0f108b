"""Calibration in the log of transformers' ``Trainer``, or TRL's: a second pass over the data of every evaluation.

Each label is predicted by the average over draws of the weights. The distributions over the vocabulary are reduced to a few
numbers per token at once, and these to sums and counts per bin after each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from bayeslora.adapter.base import Holder, find_any_holder
from bayeslora.adapter.elbo import IGNORED
from bayeslora.adapter.sampling import Sampling, evaluating, sampled
from bayeslora.errors import InputError
from bayeslora.metrics import ReliabilityBins, TokenScores, reliability_bins_from_confidence
from bayeslora.metrics.calibration import BINS
from bayeslora.number_checks import check_count
from bayeslora.predict.mc import average_in_turn
from bayeslora.predict.questions.scorer import require_numbers
from bayeslora.predict.tokens.predictions import score_tokens
from bayeslora.runs.config import check_samples
from bayeslora.train.batches import predicts_next_tokens, rows_at_once, split_rows


class CalibrationCallback(TrainerCallback):
    """``trainer.add_callback(CalibrationCallback(trainer))``: calibration of next tokens after every evaluation.

    Logs three figures over all labels that count, by the names of the evaluation's own: ``eval_ece`` (calibration error of
    the most probable token), ``eval_nll_draws`` (NLL in nats per token; ``eval_loss`` is that of the mean weights) and
    ``eval_epistemic_share`` (share of the predictive entropy that is disagreement between draws). ``trainer.evaluate``
    returns them too, so ``metric_for_best_model="eval_nll_draws"`` works.

    A model without a posterior, such as a plain LoRA, predicts as it is, and nothing is epistemic. An evaluation takes
    ``samples`` more forward passes over its data; training is not affected.

    Args:
        trainer: the trainer, which logs the figures.
        samples: draws to average; 0 uses the posterior mean.
        seed: of the draws, the same at every evaluation.
        bins: of the calibration error, of equal width.
    """

    def __init__(self, trainer: Trainer, samples: int = 4, seed: int = 0, bins: int = BINS) -> None:
        check_samples(samples)
        check_count("bins", bins)
        self._trainer = trainer
        self._sampling = Sampling(samples, seed)
        self._bins = bins

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: dict[str, float] | None = None,
        eval_dataloader: Iterable[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Measure on the batches of the evaluation that has just ended, and log."""
        if metrics is None or eval_dataloader is None:
            return
        devices = [args.device] if args.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # loaders take a seed
            found = self._measure(eval_dataloader)
        figures = {f"{_prefix(metrics)}_{name}": value for name, value in found.items()}
        metrics.update(figures)
        self._trainer.log(dict(figures))

    @torch.no_grad()
    def _measure(self, batches: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        totals: _Totals | None = None
        with _in_use(self._trainer.model, self._sampling) as networks:
            for batch in batches:
                rows = self._of_all_processes(self._score_batch(networks, self._trainer._prepare_inputs(batch)))
                counted = rows[~rows.isnan().any(-1)].numpy()
                if len(counted):
                    part = _Totals.of(counted, self._bins)
                    totals = part if totals is None else totals + part
        if totals is None:
            raise InputError(
                f"no label of the evaluation counts, all are {IGNORED}; give an eval_dataset with labels, or leave "
                "CalibrationCallback out"
            )
        return totals.figures()

    def _score_batch(self, networks: _Networks, inputs: Mapping[str, Any]) -> Tensor:
        """Scores ``[B, T - 1, 6]`` of the labels: :class:`TokenScores` and the mean entropy of the draws; NaN where none
        counts."""
        _require_next_tokens(networks.model, inputs)
        return torch.cat(
            [self._score(networks, part) for part in split_rows(inputs, rows_at_once(self._trainer, inputs))]
        )

    def _score(self, networks: _Networks, inputs: Mapping[str, Any]) -> Tensor:
        labels = inputs["labels"][:, 1:]
        counted = labels != IGNORED
        given = {name: value for name, value in inputs.items() if name != "labels"}
        entropies: list[Tensor] = []

        def predict() -> Tensor:
            with self._trainer.compute_loss_context_manager():
                logits: Tensor = networks.model(**given, use_cache=False).logits
            log_probabilities = logits[:, :-1][counted].float().log_softmax(-1)
            entropies.append(torch.special.entr(log_probabilities.exp()).sum(-1))
            return log_probabilities

        averaged = networks.average(predict)
        require_numbers(averaged)
        scores = score_tokens(averaged, labels[counted])
        aleatoric = torch.stack(entropies).mean(0).cpu().numpy()
        columns = [getattr(scores, it.name) for it in fields(TokenScores)]
        table = torch.full((*labels.shape, len(columns) + 1), torch.nan, dtype=torch.float64)
        table[counted.cpu()] = torch.from_numpy(np.column_stack([*columns, aleatoric]).astype(np.float64))
        return table

    def _of_all_processes(self, table: Tensor) -> Tensor:
        """The rows of all processes, without those that only fill up the last batch."""
        trainer = self._trainer
        if trainer.args.world_size == 1:
            return table
        wide = trainer.accelerator.pad_across_processes(table.to(trainer.args.device), dim=1, pad_index=torch.nan)
        gathered: Tensor = trainer.gather_function(wide)
        return gathered.cpu()


@dataclass(frozen=True)
class _Networks:
    """The networks in use: draws of an adapter, or the model as it is."""

    model: nn.Module
    holder: Holder | None = None
    count: int = 1

    def average(self, predict: Callable[[], Tensor]) -> Tensor:
        """Logarithm of the mean of the probabilities of all of them."""
        return predict() if self.holder is None else average_in_turn(self.holder, self.count, predict)


@contextmanager
def _in_use(model: nn.Module, sampling: Sampling) -> Iterator[_Networks]:
    if not any(isinstance(module, Holder) for module in model.modules()):
        with evaluating(model):
            yield _Networks(model)
        return
    with sampled(model, sampling) as count:
        yield _Networks(model, find_any_holder(model), count)


@dataclass(frozen=True)
class _Totals:
    """Sums over tokens.

    Attributes:
        bins: of the confidences.
        nll: of the labels.
        entropy: of the averaged predictions.
        aleatoric: mean over the draws of their entropies.
    """

    bins: ReliabilityBins
    nll: float
    entropy: float
    aleatoric: float

    @classmethod
    def of(cls, rows: NDArray[np.float64], bins: int) -> _Totals:
        """Totals of tokens, from their scores and aleatoric entropies ``[N, 6]``."""
        *columns, aleatoric = rows.T
        scores = TokenScores(*columns)
        confidence = scores.confidence.astype(np.float32)  # as it was computed: bins compare in the dtype given
        found = reliability_bins_from_confidence(confidence, scores.correct.astype(bool), bins)
        return cls(found, scores.nll * len(scores), float(scores.entropy.sum()), float(aleatoric.sum()))

    def __add__(self, other: _Totals) -> _Totals:
        return _Totals(
            bins=self.bins + other.bins,
            nll=self.nll + other.nll,
            entropy=self.entropy + other.entropy,
            aleatoric=self.aleatoric + other.aleatoric,
        )

    def figures(self) -> dict[str, float]:
        """What is logged."""
        epistemic = max(0.0, self.entropy - self.aleatoric)  # below zero by rounding only
        return {
            "ece": self.bins.ece,
            "nll_draws": self.nll / int(self.bins.count.sum()),
            "epistemic_share": epistemic / self.entropy if self.entropy > 0.0 else 0.0,
        }


def _prefix(metrics: Mapping[str, float]) -> str:
    """How the names of an evaluation begin: ``eval``, with the name of the dataset if there are several."""
    return next((it.removesuffix("_runtime") for it in metrics if it.endswith("_runtime")), "eval")


def _require_next_tokens(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuse labels that are not those of a causal language model, one for each token."""
    labels, ids = (getattr(inputs.get(name), "shape", None) for name in ("labels", "input_ids"))
    if labels is None or labels != ids:
        raise InputError(
            f"CalibrationCallback needs a causal language model with a label for every token, but labels have shape "
            f"{labels and tuple(labels)} and input_ids {ids and tuple(ids)}; leave it out of other evaluations"
        )
    if not predicts_next_tokens(model):
        raise InputError("CalibrationCallback needs a causal language model, which this model is not; leave it out")
