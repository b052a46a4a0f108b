"""Components that have learnt nothing: how they are recognised, and what becomes of them."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from adapter.cases import adapted
from bayeslora import find_holder
from bayeslora.posterior import LayerShape, PointPosterior
from bayeslora.posterior.decoupled import DecoupledConfig, DecoupledPosterior
from bayeslora.train import components
from bayeslora.train.components import ComponentLosses, component_figures, copy_component, failed_components
from train.test_fit import Figures, assert_identical, make_fit, parameters

COMPONENTS, DRAWS = 4, 8


@pytest.mark.parametrize("examples", [5, 8, 21])
@pytest.mark.parametrize(("draws", "count"), [(8, 4), (4, 4), (2, 2), (6, 3)])
def test_losses_are_added_up_by_component(examples, draws, count):
    losses = torch.rand(examples)
    terms, counts = [1 + k % 3 for k in range(examples)], [float(k % 5 != 0) for k in range(examples)]
    wanted = torch.zeros(3, count)
    for k in range(examples):
        component = k % draws // (draws // count)
        wanted[:, component] += torch.tensor([losses[k], terms[k] * counts[k], counts[k]])
    torch.testing.assert_close(component_figures(losses, terms, counts, draws, count), wanted.flatten())


def test_draws_that_are_not_divided_evenly_say_nothing():
    assert not component_figures(torch.rand(6), [1] * 6, [1.0] * 6, 6, 4).any()


def test_losses_of_steps_add_up_and_few_examples_say_nothing():
    found = ComponentLosses()
    for _ in range(components.FEWEST):
        assert found.means() == []
        found.add([1.0, 3.0, 2.0, 4.0, 1.0, 1.0])
    assert found.means() == [0.5, 0.75]


@pytest.mark.parametrize(
    ("means", "failed"),
    [
        ([], []),
        ([0.4], []),
        ([0.4, 0.5, 0.4, 0.6], []),
        ([0.37, 0.38, 1.39, 0.36], [2]),
        ([1.39, 0.38, 1.39, 0.36, 0.4], [0, 2]),
        ([1.39, 1.39, 1.39, 1.39], []),
        ([0.3, 1.39], [1]),
        ([0.69, 0.58, 0.6, 0.57], []),
    ],
)
def test_those_far_worse_than_the_others_have_failed(means, failed):
    assert failed_components(means, untrained=1.39) == failed


@pytest.mark.parametrize(
    "means", [[0.302, 0.11, 0.141, 0.161], [0.0193, 0.0067, 0.009, 0.008], [1e-6, 1e-7, 1e-7, 1e-7]]
)
def test_one_that_has_learnt_well_is_not_replaced_by_one_that_is_better(means):
    assert failed_components(means, untrained=1.39) == []


def test_a_copy_takes_what_the_optimiser_knows_along():
    parameter = torch.nn.Parameter(torch.randn(2, 3, 4, 5))
    optimiser = torch.optim.AdamW([parameter])
    parameter.square().sum().backward()
    optimiser.step()
    before = {name: it.clone() for name, it in (("p", parameter.detach()), *optimiser.state[parameter].items())}
    copy_component([parameter], optimiser, source=2, target=0)
    for name, it in (("p", parameter.detach()), *optimiser.state[parameter].items()):
        if it.ndim:
            assert torch.equal(it[:, 0], before[name][:, 2]) and torch.equal(it[:, 1:], before[name][:, 1:])
        else:
            assert torch.equal(it, before[name])


def test_components_are_parameters_of_mixtures_only():
    layers = [LayerShape("a", 12, 10, rank=3), LayerShape("b", 20, 10, rank=3)]
    mixture = DecoupledPosterior(layers)
    found = {id(it) for it in mixture.component_parameters()}
    assert {name for name, it in mixture.named_parameters() if id(it) in found} == {
        name for name in mixture.state_dict() if name.startswith(("mean_A_", "B_"))
    }
    assert all(it.shape[1] == COMPONENTS for it in mixture.component_parameters())
    for other in (DecoupledPosterior(layers, DecoupledConfig(components=1)), PointPosterior(layers)):
        assert other.component_parameters() == []


def model(lost=None):
    made = adapted(posterior="decoupled", target_modules=["q_proj", "lm_head"])
    if lost is not None:
        with torch.no_grad():
            for it in find_holder(made).component_parameters():
                it[:, lost] = 3.0 * torch.randn(it[:, lost].shape, generator=torch.Generator().manual_seed(0))
    return made


def run(given, **changes):
    return make_fit(given, count=72, batch_size=8, draws=DRAWS, epochs=2, learning_rate=1e-3, **changes)


def test_a_component_that_is_lost_goes_on_as_a_copy_of_the_best(monkeypatch):
    """After the first epoch; it is not touched again, and goes its own way."""
    monkeypatch.setattr(components, "FEWEST", 16)
    given = model(lost=1)
    state = run(given)()
    (restarted,) = [it for record in state.history for it in record.get("restarted", [])]
    means = restarted["train_nll"]
    assert (restarted["epoch"], restarted["component"]) == (1, 1) and "restarted" in state.history[0]
    assert restarted["from"] == min(range(COMPONENTS), key=means.__getitem__)
    assert means[1] > 2 * max(means[:1] + means[2:])
    assert state.components == ComponentLosses() and state.restarted == []
    for it in find_holder(given).component_parameters():
        apart = (it[:, 1] - it[:, restarted["from"]]).abs().max()
        assert 0 < apart < 1


def test_where_none_is_lost_nothing_changes(monkeypatch):
    found = []
    for factor in (2.0, float("inf")):
        monkeypatch.setattr(components, "FAILED", factor)
        given = model()
        state = run(given)()
        assert not any("restarted" in record for record in state.history)
        found.append(parameters(given))
    assert_identical(*found)


@pytest.mark.parametrize("stop", [5, 12])
def test_an_interrupted_run_restarts_the_same(tmp_path, monkeypatch, stop):
    """Interrupted in the epoch in which the component is lost, or after it was replaced."""
    monkeypatch.setattr(components, "FEWEST", 16)

    whole, parts = model(lost=1), model(lost=1)
    want = run(whole)()
    kept = {"checkpoint": tmp_path / "c.safetensors", "checkpoint_seconds": 0.0}
    with pytest.raises(ConnectionError, match="the power is gone"):
        run(parts, fit={**kept, "log": Figures(stop)})()
    parts = model(lost=1)
    got = run(parts, fit=kept)()
    assert got.history == want.history
    assert_identical(parameters(parts), parameters(whole))


def test_components_of_sharded_parameters_are_copied_in_every_share(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parameter = torch.nn.Parameter(distribute_tensor(torch.randn(2, 3, 4, 5), mesh, [Shard(0)]))
        want = parameter.full_tensor().detach().clone()
        want[:, 0] = want[:, 2]
        copy_component([parameter], torch.optim.AdamW([parameter]), source=2, target=0)
        assert torch.equal(parameter.full_tensor(), want)
    finally:
        torch.distributed.destroy_process_group()
