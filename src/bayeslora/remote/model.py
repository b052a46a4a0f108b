"""A served run: its draws are adapters on a server, and the client averages over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from bayeslora.data_frames import Results
from bayeslora.errors import InputError
from bayeslora.export.manifest import read_manifest
from bayeslora.number_checks import check_count
from bayeslora.remote.endpoint import Endpoint, Refused
from bayeslora.remote.requests import Found, Request, echo_requests, knows_next_tokens, next_token_requests
from bayeslora.tasks import EncodedItem, Item, encode_items, make_item

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from bayeslora.predict.questions.answers import Answer
    from bayeslora.predict.questions.predictions import Predictions
    from bayeslora.predict.questions.scorer import DrawScores

Way = Callable[[Sequence[EncodedItem]], Iterator[Request[Found]]]


class RemoteModel:
    """An exported run on a server; its predictions equal the run's own, up to the server's precision.

    Args:
        url: of the server, such as ``http://127.0.0.1:8000``.
        manifest: ``manifest.json`` of the export, or its directory.
        tokenizer: of the base model; by default loaded by its name in the manifest.
        api_key: sent to the server as a bearer token.
        timeout: seconds per attempt of a request.
        retries: maximum retries of a request after temporary failures.
        workers: maximum concurrent requests.
    """

    def __init__(
        self,
        url: str,
        manifest: str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: int = 3,
        workers: int = 8,
    ) -> None:
        check_count("workers", workers)
        self.endpoint = Endpoint(url, api_key, timeout, retries)
        self.manifest = read_manifest(manifest)
        self.workers = workers
        self._way: Way | None = None
        from bayeslora.predict.calibrate import Calibration

        self.calibration = Calibration(
            temperature=self.manifest.temperature,
            threshold=self.manifest.threshold,
            conformal=dict(self.manifest.conformal),
        )
        if tokenizer is None:
            from bayeslora.models import load_tokenizer

            tokenizer = load_tokenizer(self.manifest.base_model, revision=self.manifest.revision)
        self.tokenizer = tokenizer

    def ask(
        self, question: str, choices: Sequence[str], passage: str = "", level: float = 0.9, *, bare: bool = False
    ) -> Answer:
        """Answer one question; ``level`` is that of the prediction set, and a ``bare`` question has no prompt template."""
        return self.answers(self.predict([make_item(question, choices, passage, bare=bare)]), level)[0]

    def answers(self, predictions: Predictions, level: float = 0.9) -> Results[Answer]:
        """Predictions as answers, one by one, with prediction sets of this level if the run is calibrated."""
        from bayeslora.predict.questions.answers import make_answers

        return make_answers(predictions, self.calibration, level)

    def predict(self, items: Sequence[Item]) -> Predictions:
        """Predictions of many questions, in their order."""
        from bayeslora.predict.questions.predictions import Predictions

        if not items:
            raise InputError("there are no questions to predict; give at least one")
        scoring, told = self.manifest.scoring, self.manifest
        limit = min(told.max_tokens, told.context or told.max_tokens)
        scores = self._score(encode_items(items, self.tokenizer, scoring, limit, told.context or 0))
        return Predictions.from_scores(items, scores, self.calibration, scoring)

    def _score(self, items: Sequence[EncodedItem]) -> DrawScores:
        """Scores of the questions under every adapter, before calibration."""
        import torch

        from bayeslora.predict.questions.options import OptionScores
        from bayeslora.predict.questions.scorer import DrawScores

        self._way = self._way or self._find_way(items[0])
        most = max(len(item.option_ids) for item in items)
        lengths = torch.zeros(len(items), most, dtype=torch.float64)
        for row, item in enumerate(items):
            lengths[row, : len(item.option_ids)] = torch.tensor([len(ids) for ids in item.option_ids])
        totals = torch.zeros(len(self.manifest.adapters), *lengths.shape, dtype=torch.float64)
        for draw, found in enumerate(self._ask_all(list(self._way(items)))):
            for place, value in found:
                totals[draw][place] += value
        absent = lengths == 0
        means = (totals / lengths.clamp(min=1)).masked_fill(absent, -torch.inf)
        totals = totals.masked_fill(absent, -torch.inf)
        return DrawScores(OptionScores(totals, means).log_probabilities, totals)

    def _find_way(self, item: EncodedItem) -> Way:
        """Choose how to query this server: by echo only if next tokens are unsupported and echo is exact."""
        try:
            if self.endpoint.ask(self.manifest.adapters[0].name, knows_next_tokens(item.prompt_ids)):
                return next_token_requests
        except Refused as error:
            if error.status not in (400, 422):  # the server may not support the field
                raise
        if self.manifest.adapts_head:
            raise InputError(
                f"{self.endpoint.completions}: the server gives no log-probabilities of given tokens (logprob_token_ids), and "
                "echoed ones may lack what these adapters do to the output head; serve them with vLLM 0.32 or newer"
            )
        return echo_requests

    def _ask_all(self, requests: Sequence[Request[Found]]) -> list[Found]:
        """Send the requests for every adapter; returns results by adapter. If one fails, pending requests are cancelled."""
        executor = ThreadPoolExecutor(self.workers, "bayeslora-remote")
        try:
            asked = [
                [executor.submit(self.endpoint.ask, adapter.name, request) for request in requests]
                for adapter in self.manifest.adapters
            ]
            for done in as_completed([future for futures in asked for future in futures]):
                done.result()
        finally:
            executor.shutdown(cancel_futures=True)
        return [[pair for future in futures for pair in future.result()] for futures in asked]
