"""Test whether prompts may be padded on the left without changing what a model predicts.

Models of attention follow the mask and the positions. Some recurrent models read the padding, and some models derive positions
from columns. A model does not declare this, so it is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bayeslora.adapter.sampling import MEAN, sampled
from bayeslora.predict.questions.sharing import IN_HALF_PRECISION, TOLERANCE
from bayeslora.tasks.tokens import EncodedText

Predict = Callable[[Sequence[EncodedText]], Tensor]
"""Logits ``[K, vocabulary]`` of the targets of the first of some texts in a batch, which may be followed by others."""

_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def may_pad(model: nn.Module, texts: Sequence[EncodedText], predict: Predict) -> bool:
    """Whether these texts get the same predictions in shared batches as alone."""
    if len({len(text.prompt_ids) for text in texts}) < 2 or next(model.parameters()).is_meta:
        return True
    base = getattr(model, "get_base_model", lambda: model)()
    if base not in _known:
        _known[base] = _predicts_alike(model, predict)
    return _known[base]


@torch.no_grad()
def _predicts_alike(model: nn.Module, predict: Predict) -> bool:
    """Whether a text gets the same score beside one with a longer prompt as alone."""
    first = next(model.parameters())
    ids = [number % model.get_input_embeddings().weight.shape[0] for number in range(3, 27)]  # type: ignore[operator]
    text, longer = EncodedText("", ids[:4], ids[4:12]), EncodedText("", ids[:16], ids[16:])

    def score(texts: Sequence[EncodedText]) -> float:
        log_p = predict(texts).float().log_softmax(-1)
        return float(log_p.gather(-1, log_p.new_tensor(text.target_ids, dtype=torch.long)[:, None]).mean())

    with sampled(model, MEAN):
        difference = abs(score([text, longer]) - score([text]))
    return difference <= TOLERANCE.get(getattr(model, "dtype", first.dtype), IN_HALF_PRECISION)
