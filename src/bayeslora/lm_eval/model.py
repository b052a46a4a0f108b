"""The harness's Hugging Face model with draws from a posterior.

The draws are made once, from the seed, and used for every request. All of them run in one forward pass: a batch has one
block of rows per draw. Probabilities are averaged, never logits: those of a whole sequence for scoring, those of the next
token for generation.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from peft import PeftConfig
from peft.utils import CONFIG_NAME
from torch import Tensor
from tqdm import tqdm

from bayeslora.adapter import BayesLoraConfig, find_holder
from bayeslora.adapter.loading import load_adapter
from bayeslora.adapter.sampling import Sampling
from bayeslora.errors import InputError, first_line
from bayeslora.hub_names import is_hub_id
from bayeslora.models.failures import hub_failure
from bayeslora.models.locate import locate
from bayeslora.number_checks import check_seed
from bayeslora.posterior import Posterior
from bayeslora.predict.mc import average_draws, averaging
from bayeslora.predict.questions.scorer import require_numbers
from bayeslora.runs.config import check_samples
from bayeslora.runs.location import fetch_adapter

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""Cache key of the harness (``None`` for a part of a text), the context and its continuation."""

logger = logging.getLogger(__name__)


@register_model("bayeslora")
class BayesLoraLM(HFLM):
    """A causal language model with a bayeslora adapter. Calibration is not applied.

    Args:
        pretrained: the base model: ``smollm2``, a directory or a hub id.
        peft: the adapter: a directory or a hub id.
        samples: weight draws to average; 0 for the posterior mean.
        seed: of the draws.
        revision: branch, tag or commit on the hub.
        options: options of the harness's own model ``hf``.
    """

    _model: Any
    max_batch_size: int
    softmax_dtype: torch.dtype | None

    def __init__(
        self,
        pretrained: str | None = None,
        peft: str | None = None,
        samples: int = 4,
        seed: int = 0,
        revision: str = "main",
        **options: Any,
    ) -> None:
        if not isinstance(samples, int) or samples < 0:
            raise InputError(f"samples is {samples!r}; give 0 for the posterior mean, or more")
        check_samples(samples)
        check_seed(seed)
        adapter = _require_adapter(peft, revision)
        if not pretrained:
            raise InputError("no base model was given; add pretrained=MODEL to --model_args")
        try:
            super().__init__(str(locate(pretrained, None) or pretrained), revision=revision, **options)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise InputError(
                f"an option is not known ({first_line(error)}); check the names in --model_args"
            ) from error
        except OSError as error:
            if (failure := hub_failure(pretrained, revision, error)) is None:
                raise
            raise failure from error
        if self.backend != "causal":
            raise InputError(f"{pretrained}: is not a causal language model; choose one like LlamaForCausalLM")
        # The harness would resize the embeddings to the tokenizer's size, which breaks an adapted head.
        self._model = load_adapter(self._model, adapter)
        self.peft = peft
        self.softmax_dtype = self.softmax_dtype or torch.float32
        self.draws = self._draw(samples, seed)
        self.max_batch_size = max(1, self.max_batch_size // self.draws)

    @torch.no_grad()
    def _draw(self, samples: int, seed: int) -> int:
        """Activate the draws, or the mean; returns the number of blocks per batch."""
        self._model.base_model.posterior_scale = 1.0
        holder = find_holder(self._model)
        if samples > 0:
            _require_draws(str(self.peft), holder.posterior(holder.active[0]))
        return Sampling(samples, seed).put_into_use(holder, fan_out=True)

    @property
    def batch_size(self) -> int | str:
        """Rows per draw, so that a batch of all draws has the requested size if possible."""
        size = self.batch_size_per_gpu
        return size if isinstance(size, str) else max(1, size // self.draws)

    # Scoring ------------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, and whether greedy decoding gives them; cached when averaged."""
        answers = [(0.0, False)] * len(requests)
        for number, totals, greedy in self._score(requests, disable_tqdm):
            answers[number] = (float(average_draws(totals)), greedy)
            if (strings := requests[number][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answers[number])
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts. Windows of a text are summed for every draw before averaging."""
        windows = [
            (text, (None, *window)) for text, request in enumerate(requests) for window in self._windows(*request.args)
        ]
        totals = torch.zeros(len(requests), self.draws, dtype=torch.float64)
        for number, of_window, _ in self._score([window for _, window in windows], disable_tqdm):
            totals[windows[number][0]] += of_window
        results = average_draws(totals.T).tolist()
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """Split a text into windows of the model's context length, each with its context; every token is in one of them."""
        tokens = self.tok_encode(text)
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
        return map(make_disjoint_window, windows)

    def _score(self, requests: Sequence[Request], disable_tqdm: bool) -> Iterator[tuple[int, Tensor, bool]]:
        """Number, log-likelihood under every draw ``[n]`` and greediness of all requests, longest first.

        Requests that differ only in their last token share a row.
        """
        rows: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            rows[self._input(context, continuation)].append(number)
        if not rows:
            return
        inputs = sorted(rows, key=len, reverse=True)
        size = self._rows_per_pass(inputs[0])
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Scoring") as bar:
            for start in range(0, len(inputs), size):
                batch = inputs[start : start + size]
                width = len(batch[0])
                kept = width - min(len(row) - len(requests[k][2]) for row in batch for k in rows[row])
                padded = [[*row, *[0] * (width - len(row))] for row in batch]  # after the text: nothing attends to it
                log_probabilities = self._log_probabilities(torch.tensor(padded, device=self.device), kept)
                for index, row in enumerate(batch):
                    own = log_probabilities[:, index, : kept - width + len(row)]
                    for number in rows[row]:
                        yield number, *_score_continuation(own, requests[number][2])
                    bar.update(len(rows[row]))

    def _input(self, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        """All tokens but the last, truncated to the context length."""
        if len(continuation) > self.max_length:
            raise InputError(
                f"a continuation has {len(continuation)} tokens, and the model sees {self.max_length} only; "
                "raise max_length if the model allows it, or choose another task"
            )
        excess = len(context) + len(continuation) - 1 - self.max_length
        if excess > 0:
            logger.warning("a request is too long for the model: its first %d tokens are left out", excess)
        return tuple((context + continuation)[max(0, excess) : -1])

    def _rows_per_pass(self, longest: tuple[int, ...]) -> int:
        """The batch size; if automatic, the largest that fits the longest input."""
        size = self.batch_size
        if isinstance(size, int):
            return size
        return int(self._detect_batch_size([(None, list(longest), [0])]))

    def _log_probabilities(self, tokens: Tensor, kept: int = 0) -> Tensor:
        """Next-token distributions of every draw, ``[n, B, kept, vocabulary]``; of all columns if ``kept`` is 0."""
        device, precision = self.device.type, self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(device, precision, enabled=precision is not None):
            logits = self.model(tokens, use_cache=False, logits_to_keep=kept).logits
        return F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype).unflatten(0, (self.draws, -1))

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Averaged next-token distributions; the harness calls this to find the largest batch size."""
        return average_draws(self._log_probabilities(inps))

    # Generation ---------------------------------------------------------------------------------------------------

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Generate with tokens from the averaged distribution. All draws condition on the same text."""
        if self.draws > 1 and generation_kwargs.get("num_beams", 1) > 1:
            raise InputError(
                f"with {self.draws} draws there is one beam, and the task wants {generation_kwargs['num_beams']}; give "
                "--gen_kwargs num_beams=1, or samples=0 for the posterior mean"
            )
        with averaging(self._model, self.draws):
            texts: Tensor = super()._model_generate(context, max_length, stop, **generation_kwargs)
        return texts


def _score_continuation(log_probabilities: Tensor, continuation: list[int]) -> tuple[Tensor, bool]:
    """Log-likelihood under every draw, and whether the averaged distributions prefer each token to all others.

    The columns that predict the continuation are the last ones of ``log_probabilities [n, K, vocabulary]``.
    """
    own = log_probabilities[:, -len(continuation) :]
    tokens = torch.tensor(continuation, device=own.device)
    totals = own[:, torch.arange(len(tokens), device=own.device), tokens].double().sum(1)
    require_numbers(totals)
    return totals.cpu(), bool((average_draws(own).argmax(-1) == tokens).all())


def _require_adapter(path: str | None, revision: str) -> Path:
    """The directory of the adapter; others are refused before the base model is loaded."""
    if not path:
        raise InputError(
            "no adapter was given; add peft=DIRECTORY to --model_args, or use --model hf for a model without one"
        )
    place = fetch_adapter(path, revision).path if is_hub_id(path) else Path(path).expanduser()
    inside = place / "adapter"
    if (inside / CONFIG_NAME).is_file():
        raise InputError(f"{path}: is a run; pass its adapter: peft={inside}")
    try:
        config = PeftConfig.from_pretrained(str(place))
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: no adapter can be read from it ({first_line(error)}); pass a directory that save_pretrained wrote, "
            "or a hub id"
        ) from error
    if not isinstance(config, BayesLoraConfig):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise InputError(f"{path}: holds an adapter of kind {kind}, not one of bayeslora; use --model hf for it")
    return place


def _require_draws(path: str, posterior: Posterior) -> None:
    """Refuse a posterior whose predictions are not those of drawn networks."""
    if posterior.linearised:
        raise InputError(
            f"{path}: a Laplace approximation answers by its linearised model, which the harness cannot score; "
            "give samples=0 for its mean"
        )
