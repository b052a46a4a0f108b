"""The running average of what is trained: against its formula, and what a run evaluates and keeps."""

import pytest
import torch

from adapter.cases import generator
from bayeslora.train.average import Average
from bayeslora.train.fit import Fit
from train.test_fit import assert_close, assert_identical, make_fit, make_whole_fit, parameters, small, validation_nll

STEPS = 9
SHARES = [min(0.8, (step - 1) / (step + 8)) for step in range(1, STEPS + 1)]
"""How much of the average each step leaves."""


def averaged(values):
    """The average after every step, by the formula."""
    kept, found = None, []
    for share, value in zip(SHARES, values, strict=True):
        kept = value if kept is None else {name: share * kept[name] + (1 - share) * value[name] for name in value}
        found.append(kept)
    return found


def watched(monkeypatch):
    """What the parameters are after every step of the runs that follow."""
    seen, taken = [], Fit._take_step

    def take_step(self, step):
        result = taken(self, step)
        seen.append(parameters(self.objective.model))
        return result

    monkeypatch.setattr(Fit, "_take_step", take_step)
    return seen


def test_the_formula():
    x, y = (torch.randn(3, 4, generator=generator()).requires_grad_() for _ in range(2))
    average, values = Average({"x": x, "y": y}, 0.8), []
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            x.add_(1.0), y.mul_(1.1)
        values.append({"average.x": x.detach().clone(), "average.y": y.detach().clone()})
        average.add(step)
        assert_close(average.tensors, averaged([*values, *values[-1:] * (STEPS - step)])[step - 1], atol=1e-6)


def test_it_is_in_use_inside_the_block_only():
    x = torch.zeros(2, requires_grad=True)
    average = Average({"x": x}, 0.5)
    with torch.no_grad():
        x.fill_(4.0)
    for error in (None, KeyError):
        with pytest.raises(KeyError) if error else average.in_use():
            if error:
                with average.in_use():
                    raise error
            assert x.tolist() == [0.0, 0.0] and average.tensors["average.x"].tolist() == [4.0, 4.0]
        assert x.tolist() == [4.0, 4.0] and average.tensors["average.x"].tolist() == [0.0, 0.0]
    average.keep()
    assert x.tolist() == [0.0, 0.0]


def test_a_run_evaluates_and_keeps_the_average_and_goes_on_from_the_last_step(monkeypatch):
    plain, model = small(), small()
    seen = watched(monkeypatch)
    make_fit(plain, epochs=3)()
    last, usual = parameters(plain), list(seen)
    seen.clear()
    evaluated = []

    def validate():
        evaluated.append(parameters(model))
        return {"nll": 0.0}

    fit = make_fit(model, epochs=3, average=0.8, validate=validate)
    fit()
    assert len(seen) == len(usual) == fit.steps == STEPS
    for got, want in zip(seen, usual, strict=True):
        assert_identical(got, want)
    wanted = averaged(usual)
    ends = range(fit.steps_per_epoch - 1, fit.steps, fit.steps_per_epoch)
    for got, end in zip(evaluated, ends, strict=True):
        assert_close(got, wanted[end], atol=1e-6)
    assert_close(parameters(model), wanted[-1], atol=1e-6)
    assert any(not torch.equal(last[name], value) for name, value in parameters(model).items())


def test_the_best_of_the_averages_is_kept():
    model, evaluated = small(), []

    def validate():
        evaluated.append(parameters(model))
        return {"nll": [2.0, 1.0, 3.0][len(evaluated) - 1]}

    make_fit(model, epochs=3, average=0.8, validate=validate, patience=2)()
    assert len(evaluated) == 3
    assert_identical(parameters(model), evaluated[1])


def test_what_is_reported_is_what_is_kept():
    """The last evaluation of a run that keeps the last average is that of the model which it leaves."""
    model = small()
    state = make_whole_fit(model, average=0.8)()
    assert validation_nll(model)["nll"] == pytest.approx(state.history[-1]["validation"]["nll"])
