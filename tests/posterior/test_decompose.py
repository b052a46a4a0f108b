"""Decompositions against their definition, on graded matrices, and where the usual solver gives up."""

import pytest
import torch

from bayeslora.posterior import decompose
from bayeslora.posterior.decompose import eigh, svd

EPSILON = torch.finfo(torch.float64).eps
SHAPES = [(1, 1), (7, 7), (20, 5), (5, 20), (3, 12, 4)]


def graded(size, rank, seed):
    """A sum of ``rank`` outer products whose lengths fall by ten orders of magnitude, in float32."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(rank, size, generator=generator) * torch.logspace(0, -5, rank)[:, None]
    return rows.mT @ rows


def fail(*arguments, **options):
    raise torch.linalg.LinAlgError("the algorithm failed to converge")


@pytest.fixture(params=["usual", "shifted", "by singular values"])
def solver(request, monkeypatch):
    """The solver of this machine, one that fails at first, and one that fails always."""
    if request.param == "shifted":
        usual, calls = torch.linalg.eigh, []

        def first_fails(matrix):
            calls.append(1)
            return usual(matrix) if len(calls) % 2 == 0 else fail()

        monkeypatch.setattr(decompose.torch.linalg, "eigh", first_fails)
    if request.param == "by singular values":
        monkeypatch.setattr(decompose.torch.linalg, "eigh", fail)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size, rank", [(1, 1), (12, 12), (60, 4), (100, 30)])
def test_eigenvectors_of_graded_matrices(solver, size, rank, seed):
    matrix = graded(size, rank, seed)
    for wanted in (matrix, matrix.double(), torch.stack([matrix, 0.5 * matrix])):
        values, vectors = eigh(wanted)
        assert values.dtype == vectors.dtype == wanted.dtype
        # each product of n terms rounds by at most n eps of the largest
        bound = 8 * size * torch.finfo(wanted.dtype).eps
        rebuilt = (vectors * values.unsqueeze(-2)) @ vectors.mT
        torch.testing.assert_close(rebuilt, wanted, rtol=0, atol=bound * float(wanted.abs().max()))
        torch.testing.assert_close(
            vectors.mT @ vectors, torch.eye(size).to(wanted).expand_as(wanted), rtol=0, atol=bound
        )
        assert (values.diff(dim=-1) >= -bound * values.abs().max()).all()


def test_values_are_those_of_an_independent_solver(solver):
    matrix = torch.diag(torch.tensor([3.0, -1.0, 0.0, 1e-9], dtype=torch.float64))
    matrix[0, 1] = matrix[1, 0] = 0.5
    mean, half = 1.0, (2.0**2 + 0.5**2) ** 0.5  # of the block of two
    want = torch.tensor([mean - half, 0.0, 1e-9, mean + half], dtype=torch.float64)
    torch.testing.assert_close(eigh(matrix)[0], want, rtol=0, atol=16 * EPSILON)


def test_matrices_that_are_symmetric_but_for_rounding_have_one_answer(solver):
    """Whatever is computed in one triangle only: the usual solver looks at no other."""
    matrix = graded(12, 12, seed=5).double()
    matrix += 1e-6 * torch.randn(12, 12, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    values, vectors = eigh(matrix)
    torch.testing.assert_close(eigh(matrix.mT.contiguous())[0], values, rtol=0, atol=1e-12)
    rebuilt = (vectors * values) @ vectors.mT
    torch.testing.assert_close(rebuilt, 0.5 * (matrix + matrix.mT), rtol=0, atol=1e-12)


@pytest.mark.parametrize("broken", [False, True], ids=["usual", "fails"])
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values(monkeypatch, broken, shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = torch.linalg.svdvals(matrix)
    if broken:
        monkeypatch.setattr(decompose.torch.linalg, "svd", fail)
    U, d, Vh = svd(matrix)
    count = min(shape[-2:])
    assert U.shape[-1] == d.shape[-1] == Vh.shape[-2] == count
    torch.testing.assert_close(d, want, rtol=1e-10, atol=0)
    torch.testing.assert_close((U * d.unsqueeze(-2)) @ Vh, matrix, rtol=0, atol=1e-12)
    for basis in (U.mT @ U, Vh @ Vh.mT):
        torch.testing.assert_close(basis, torch.eye(count).double().expand_as(basis), rtol=0, atol=1e-12)


@pytest.mark.parametrize("broken", [False, True], ids=["usual", "fails"])
def test_singular_vectors_are_orthonormal_where_the_rank_is_low(monkeypatch, broken):
    generator = torch.Generator().manual_seed(2)
    matrix = torch.randn(9, 2, generator=generator) @ torch.randn(2, 6, generator=generator)
    if broken:
        monkeypatch.setattr(decompose.torch.linalg, "svd", fail)
    U, d, Vh = svd(matrix)
    torch.testing.assert_close((U * d) @ Vh, matrix, rtol=0, atol=1e-5)
    torch.testing.assert_close(U.mT @ U, torch.eye(6), rtol=0, atol=1e-5)
    torch.testing.assert_close(Vh @ Vh.mT, torch.eye(6), rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_refused(value):
    matrix = torch.eye(4)
    matrix[1, 2] = matrix[2, 1] = value
    for solve in (eigh, svd):
        with pytest.raises(ArithmeticError, match="not finite"):
            solve(matrix)
