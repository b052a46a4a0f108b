"""Draws of the linearised model against draws of the model."""

from __future__ import annotations

import pytest
import torch

from adapter.cases import adapted
from bayeslora import find_holder
from bayeslora.adapter.sampling import Sampling
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.predict.questions.scores import score_questions
from bench.test_scripts import script
from predict.test_options import questions


@pytest.mark.parametrize("settings", [{"components": 1}, {"components": 2}])
def test_the_error_falls_with_the_square_of_the_width(settings: dict[str, int]) -> None:
    """Both ways have the same draws, so what differs is of second order in the deviations."""
    model = adapted(posterior="decoupled", settings={**settings, "width": 0.5}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "mean_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    scorer, items = Scorer(model), questions(seed=1, count=5)
    posterior = find_holder(model).posterior("default")
    errors = []
    for scale in (0.2, 0.02):
        posterior.scale = scale
        exact = score_questions(scorer, items, Sampling(4, 0), batch_tokens=4096).log_probabilities.double()
        line = script("linearised_draws").linearised(scorer, items, 4, 0, 4096)
        present = exact.isfinite()
        assert torch.equal(present, line.isfinite()) and torch.equal(present[0], present.all(0))
        spread = (exact - exact.mean(0))[present].abs().max()
        errors.append(float((exact - line)[present].abs().max()))
        assert errors[-1] < 0.3 * spread
    assert errors[1] < 0.05 * errors[0]  # a hundredth, but for rounding
