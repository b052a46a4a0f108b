"""TFB: turning the factors changes nothing, its noise is as wide in every direction, and the search returns what fits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bayeslora.errors import InputError
from bayeslora.methods.tfb import _change_on_anchors, search_width
from bayeslora.posterior import Factors, LayerShape
from bayeslora.posterior.tfb import TfbConfig, TfbPosterior

LAYERS = [LayerShape("q", 12, 9, rank=4), LayerShape("k", 12, 9, rank=4), LayerShape("v", 3, 9, rank=4)]


def lora(posterior, seed=0):
    generator = torch.Generator().manual_seed(seed)
    A, B = (
        tuple(torch.randn((len(g), 1, *g.factor_shapes[f]), generator=generator) for g in posterior.groups)
        for f in "AB"
    )
    return Factors(posterior.groups, A, B)


@pytest.fixture(params=range(3))
def made(request):
    posterior = TfbPosterior(LAYERS)
    given = lora(posterior, request.param)
    posterior.start_from(given)
    return posterior, given


def test_the_mean_update_is_the_loras(made):
    posterior, given = made
    for layer in LAYERS:
        torch.testing.assert_close(
            posterior.mean().product(layer.name), given.product(layer.name), rtol=1e-4, atol=1e-4
        )


def test_columns_of_b_are_orthogonal_with_falling_norms(made):
    posterior, _ = made
    for group in posterior.groups:
        B = posterior.get_parameter(f"B_{group.key}")
        gram = B.mT @ B
        torch.testing.assert_close(gram, torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1)), rtol=0, atol=1e-4)
        assert (gram.diagonal(dim1=-2, dim2=-1).diff(dim=-1) <= 1e-4).all()


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_noise_of_the_update_is_isotropic_in_the_directions_of_b(made, scale):
    """Card 8: covariance ``σ² (U Uᵀ) ⊗ I``."""
    posterior, given = made
    posterior.width, posterior.scale = 0.3, scale
    noise = posterior.draw(20_000, torch.Generator().manual_seed(1)).product("q") - given.product("q")
    rows = noise.mT.reshape(-1, 12)  # every column of the update is a draw of its own
    U = torch.linalg.qr(given["q"].B[0]).Q
    torch.testing.assert_close(rows.T @ rows / len(rows), (0.3 * scale) ** 2 * U @ U.T, rtol=0, atol=2e-3 * scale**2)
    columns = noise.reshape(-1, 9)
    want = (0.3 * scale) ** 2 * 4 / 12 * torch.eye(9)
    torch.testing.assert_close(columns.T @ columns / len(columns), want, rtol=0, atol=1e-3 * scale**2)


def test_directions_that_b_does_not_use_get_no_noise():
    posterior = TfbPosterior(LAYERS)
    given = lora(posterior)
    with torch.no_grad():
        given.B[0][:, :, :, 3] = given.B[0][:, :, :, 2]  # rank 3
        given.B[0][1] = 0.0  # a layer that has not learned anything
    posterior.start_from(given)
    posterior.width = 1.0
    widths = posterior.get_buffer(f"width_{posterior.groups[0].key}")
    assert (widths > 0).tolist() == [[True, True, True, False], [False] * 4]
    draws = posterior.draw(3)
    assert all(torch.isfinite(factor).all() for name in draws for factor in draws[name])
    torch.testing.assert_close(draws.product("k"), torch.zeros(3, 12, 9))


def test_noise_depends_on_the_update_and_not_on_how_it_is_factored():
    """A small ``B`` with a large ``A``, as a rate of its own for each leaves them, has the same directions."""
    usual, uneven = TfbPosterior(LAYERS), TfbPosterior(LAYERS)
    given = lora(usual)
    usual.start_from(given)
    uneven.start_from(Factors(given.groups, tuple(1e6 * a for a in given.A), tuple(1e-6 * b for b in given.B)))
    for group in usual.groups:
        widths = usual.get_buffer(f"width_{group.key}")
        assert widths[:, :3].all()
        torch.testing.assert_close(1e-6 * uneven.get_buffer(f"width_{group.key}"), widths, rtol=1e-4, atol=0)


def test_without_width_draws_are_the_lora(made):
    posterior, given = made
    torch.testing.assert_close(posterior.draw(2).product("v")[1], given.product("v")[0], rtol=1e-4, atol=1e-4)


# The search -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edge", [1e-5, 5e-4, 0.002, 0.0071, 0.0149, 0.02, 0.4])
def test_the_search_returns_the_largest_width_it_found_to_fit(edge):
    asked = []

    def change(width):
        asked.append(width)
        return width / edge

    found = search_width(change, TfbConfig(tolerance=1.0, bisections=8))
    fitting = [width for width in asked if width <= edge]
    assert found == max(fitting) and edge * 0.9 <= found <= edge
    upper = search_width(lambda width: width / edge, TfbConfig(tolerance=1.0, bisections=8, upper_end=True))
    assert edge < upper <= edge * 1.1


def test_a_model_that_bears_no_noise_gets_none_and_a_tolerance_that_nothing_exceeds_is_refused():
    assert search_width(lambda width: 2.0, TfbConfig(tolerance=1.0)) == 0.0
    with pytest.raises(
        InputError, match=r"tolerance is 1, and noise of width 30.72, .* by 0.7 only; give less than that"
    ):
        search_width(lambda width: 0.7, TfbConfig(tolerance=1.0))


class Anchors:
    encoded = range(3)

    def __len__(self):
        return 3


def inputs_of(score):
    """What the search is given: a predictor that scores like this, with draws or without."""
    predictor = SimpleNamespace(score=score, with_draws=lambda samples: predictor)
    report = SimpleNamespace(stage=lambda name: lambda done, total: None)
    return SimpleNamespace(train=Anchors(), seed=0, predictor=predictor, report=report)


def test_a_lora_that_is_certain_of_all_anchors_keeps_its_width_while_it_is():
    """Its NLL is 0, so every change of it is larger than any share."""
    posterior = SimpleNamespace(config=TfbConfig(change="nll"), width=0.0)

    def score(anchors):
        certain = posterior.width < 0.01
        return SimpleNamespace(predictive=np.log([[1.0, 1e-300] if certain else [0.9, 0.1]] * len(anchors)))

    change = _change_on_anchors(inputs_of(score), posterior)
    assert change(0.005) == 0.0 and change(0.02) > 1e6


def test_answers_that_any_noise_changes_by_rounding_do_not_count():
    """In 16 bits an answer that is nearly a tie depends on how values are rounded, and any noise changes that."""
    posterior = SimpleNamespace(config=TfbConfig(tolerance=0.1), width=0.0)

    def score(anchors):
        tie = [0.501, 0.499] if posterior.width == 0.0 else [0.499, 0.501]
        clear = [0.9, 0.1] if posterior.width <= 0.004 else [0.4, 0.6]
        return SimpleNamespace(predictive=np.log([tie, clear, clear]))

    width = search_width(_change_on_anchors(inputs_of(score), posterior), posterior.config)
    assert 0.003 < width <= 0.004


@pytest.mark.parametrize(
    "settings, advice",
    [
        ({"change": "ece"}, "change must be one of nll, accuracy"),
        ({"tolerance": 0.0}, "tolerance must be positive"),
        ({"low": 0.1, "high": 0.1}, "low must be below high"),
        ({"anchors": 0}, "anchors must be at least 1"),
        ({"smallest": 1.0}, "below 1"),
    ],
)
def test_bad_settings_are_refused(settings, advice):
    with pytest.raises(ValueError, match=advice):
        TfbConfig(**settings)
