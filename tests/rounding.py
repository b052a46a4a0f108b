"""How far two ways of computing the same may be apart: bounds from arithmetic, not from what one machine gave."""

from __future__ import annotations

import torch
from torch import Tensor


def summed(want: Tensor, terms: int = 1024) -> dict[str, float]:
    """Tolerances of entries that are sums of ``terms`` products, added up in another order.

    Every addition rounds by at most eps of what has been summed so far, and that is bounded by the largest entry: the products of
    an entry that cancel to nothing are as large as those of its neighbours. A gradient of a tiny model has about a thousand.
    """
    size = float(want.detach().abs().max()) if want.numel() else 0.0
    return {"atol": terms * torch.finfo(want.dtype).eps * size, "rtol": 0.0}
