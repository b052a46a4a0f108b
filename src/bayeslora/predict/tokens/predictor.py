"""Predict all tokens of texts: draws, averaging, temperature, metrics, and their file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from bayeslora.adapter.sampling import Sampling
from bayeslora.atomic_files import replacing, tensor_failures
from bayeslora.data_frames import said_metrics
from bayeslora.errors import InputError
from bayeslora.metrics import TokenScores, top_entropy
from bayeslora.metrics.validation import BoolArray
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.tokens.predictions import predict_tokens, score_tokens
from bayeslora.predict.tokens.temperature import fit_token_temperature
from bayeslora.progress import Advance
from bayeslora.tasks.tokens import EncodedText, tokens_digest

UNCERTAIN = 0.05
"""Share of the tokens that count as uncertain: those of the highest entropy under a LoRA."""


@dataclass(frozen=True, eq=False)
class TokenPredictions:
    """Predictions of the tokens of texts.

    Attributes:
        scores: of all tokens, text by text.
        lengths: number of tokens of every text that count.
        digest: hash of the tokens, to check that other predictions are of the same tokens.
        uncertain: which tokens count as uncertain, if known.
    """

    scores: TokenScores
    lengths: tuple[int, ...]
    digest: str
    uncertain: BoolArray | None = None

    def __repr__(self) -> str:
        figures = said_metrics(token_metrics(self.scores)) if len(self.scores) else "nothing to measure"
        return f"TokenPredictions({len(self.lengths)} texts, {len(self.scores)} tokens, {figures})"

    def with_reference(self, reference: TokenPredictions, name: str) -> TokenPredictions:
        """Return a copy with the uncertain tokens chosen by the entropies of another model, called ``name``."""
        if reference.digest != self.digest:
            raise InputError(
                f"{name}: was evaluated on other tokens (another task, split, tokenizer or --max-tokens); give one that was "
                "evaluated on the same"
            )
        return replace(self, uncertain=top_entropy(reference.scores.entropy, UNCERTAIN))

    def metrics(self) -> dict[str, float]:
        """All metrics as fractions (NLL and entropy in nats per token), and those of the uncertain tokens if known."""
        figures = token_metrics(self.scores)
        if self.uncertain is not None:
            some = token_metrics(self.scores.subset(self.uncertain))
            figures |= {f"uncertain_{name}": some[name] for name in ("nll", "brier", "ece", "acc")}
        return figures

    def write(self, path: Path) -> None:
        """Write to a file; the same predictions give the same bytes."""
        arrays = {f.name: np.ascontiguousarray(getattr(self.scores, f.name)) for f in fields(TokenScores)}
        arrays["lengths"] = np.array(self.lengths, dtype=np.int64)
        if self.uncertain is not None:
            arrays["uncertain"] = self.uncertain
        with tensor_failures(path), replacing(path) as partial:
            save_file(arrays, partial, metadata={"digest": self.digest})


def token_metrics(scores: TokenScores) -> dict[str, float]:
    """Metrics over tokens; the most probable token is the prediction."""
    return {
        "nll": scores.nll,
        "brier": scores.brier_score,
        "ece": scores.ece(),
        "acc": scores.accuracy,
        "confidence": float(scores.confidence.mean(dtype=np.float64)),
        "entropy": float(scores.entropy.mean()),
    }


def read_token_predictions(path: Path) -> TokenPredictions:
    """Read a file written by :meth:`TokenPredictions.write`."""
    try:
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            digest = (file.metadata() or {})["digest"]
        scores = TokenScores(**{f.name: arrays[f.name] for f in fields(TokenScores)})
        return TokenPredictions(scores, tuple(arrays["lengths"].tolist()), digest, arrays.get("uncertain"))
    except (OSError, SafetensorError, KeyError) as error:
        raise InputError(f"{path}: is no complete file of token scores ({error})") from error


@dataclass(frozen=True)
class TokenPredictor:
    """Predicts the tokens of texts.

    Attributes:
        model: with an adapter.
        pad_id: padding token; other tokens never attend to it.
        sampling: draws of the weights to average.
        batch_tokens: tokens per batch.
        calibration: calibration whose temperature is applied.
    """

    model: nn.Module
    pad_id: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    batch_tokens: int = 16384
    calibration: Calibration = field(default_factory=Calibration)

    def __call__(self, texts: Sequence[EncodedText], advance: Advance | None = None) -> TokenPredictions:
        """Scores of all tokens of the texts, in their order."""
        found: list[TokenScores | None] = [None] * len(texts)
        for rows, log_probabilities, labels in self._chunks(texts, advance):
            scores = score_tokens(log_probabilities, labels)
            ends = np.cumsum([texts[row].terms for row in rows])
            for row, positions in zip(rows, np.split(np.arange(len(scores)), ends[:-1]), strict=True):
                found[row] = scores.subset(positions)
        whole = TokenScores.concatenate([scores for scores in found if scores is not None])
        return TokenPredictions(whole, tuple(text.terms for text in texts), tokens_digest(texts))

    def fit_temperature(self, texts: Sequence[EncodedText], advance: Advance | None = None) -> float:
        """Fit the temperature of least NLL on these texts, for probabilities averaged over the draws."""
        plain = replace(self, calibration=Calibration())

        def sweep(number: int, sweeps: int) -> Iterator[tuple[Tensor, Tensor]]:
            def told(done: int, total: int) -> None:
                if advance is not None:
                    advance(number * total + done, sweeps * total)

            return ((log_p, labels) for _, log_p, labels in plain._chunks(texts, told))

        return fit_token_temperature(sweep)

    def _chunks(
        self, texts: Sequence[EncodedText], advance: Advance | None
    ) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        for predicted in predict_tokens(
            self.model,
            texts,
            self.sampling,
            pad_id=self.pad_id,
            batch_tokens=self.batch_tokens,
            advance=advance,
        ):
            log_probabilities = predicted.log_probabilities
            if self.calibration.temperature != 1.0:
                log_probabilities = (log_probabilities / self.calibration.temperature).log_softmax(-1)
            yield predicted.rows, log_probabilities, predicted.labels
