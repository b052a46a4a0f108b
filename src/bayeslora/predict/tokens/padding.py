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
from bayeslora.predict.questions.sharing import same_up_to_round_off
from bayeslora.tasks.tokens import EncodedText

Predict = Callable[[Sequence[EncodedText]], Tensor]
"""Logits ``[K, vocabulary]`` of the targets of the first of some texts in a batch, and of the padding behind them."""

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
    """Whether a text is predicted beside one with a longer prompt as alone."""
    ids = [number % model.get_input_embeddings().weight.shape[0] for number in range(3, 27)]  # type: ignore[operator]
    text, longer = EncodedText("", ids[:4], ids[4:12]), EncodedText("", ids[:16], ids[16:])
    ends_later = EncodedText("", ids[:4], ids[4:])  # the text is then padded at its end, which changes round-off alone

    def predicted(*others: EncodedText) -> Tensor:
        return predict([text, *others])[: len(text.target_ids)].float()

    precision = getattr(model, "dtype", next(model.parameters()).dtype)
    with sampled(model, MEAN):
        return same_up_to_round_off(predicted(), predicted(longer), lambda: predicted(ends_later), precision)
