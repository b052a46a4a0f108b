"""Products with inputs that are computed again: the numbers, and what is kept."""

import pytest
import torch

from bayeslora.adapter.recompute import project, recomputable


def made(seed=0, n=2, needed=True):
    source = torch.Generator().manual_seed(seed)
    raw = torch.randn(4, 3, 5, generator=source, dtype=torch.float64).requires_grad_(needed)
    return raw, torch.randn(n, 2, 5, generator=source, dtype=torch.float64).requires_grad_()


def double(raw):
    return raw.sin() * 2


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("needed", [False, True])
def test_values_and_gradients_are_those_of_the_product(n, needed):
    raw, A = made(n=n, needed=needed)
    slope = torch.randn(n, 12 // n, 2, dtype=torch.float64)
    wanted = [A, raw] if needed else [A]
    plain, marked = double(raw), recomputable(double(raw), double, raw)
    found = [project(x, A) for x in (marked, plain)]
    torch.testing.assert_close(*found)
    want = torch.einsum("nti,nri->ntr", plain.reshape(n, -1, 5), A)
    torch.testing.assert_close(found[0], want)
    for got, expected in zip(*(torch.autograd.grad(it, wanted, slope) for it in found), strict=True):
        torch.testing.assert_close(got, expected)


def test_the_input_itself_is_not_kept():
    raw, A = made()
    x = double(raw)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: kept.append(it.data_ptr()) or it, lambda it: it):
        project(x, A)
        assert x.data_ptr() in kept
        kept.clear()
        project(recomputable(x, double, raw), A)
    assert x.data_ptr() not in kept and raw.data_ptr() in kept


def test_without_gradients_and_in_mixed_precision_nothing_is_computed_again():
    def never(raw):
        raise AssertionError

    raw, A = made()
    x = recomputable(double(raw), never, raw)
    with torch.no_grad():
        project(x, A)
    project(x, A.detach()).sum().backward()
    raw, A = (it.detach().float().requires_grad_() for it in (raw, A))
    x = recomputable(double(raw), never, raw)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = project(x, A)
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16 and A.grad is not None


def test_an_input_that_was_changed_since_is_refused():
    raw, A = made(needed=False)
    found = project(recomputable(double(raw), double, raw), A)
    raw.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()
