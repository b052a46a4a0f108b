"""Adapters with a point estimate in the lower layers and a distribution in the upper ones."""

import pytest
import torch
from peft import PeftModel, get_peft_model

from adapter.cases import MODELS, adapted, base_model, config, generator, logits, tokens
from bayeslora import find_holder
from bayeslora.posterior import POSTERIORS, LayerShape, build_posterior

LAYERS = [LayerShape(f"layers.{k}.q", 12, 10, 3) for k in range(4)] + [LayerShape("head", 20, 10, 3)]
POINTS = {"layers.0.q", "layers.1.q"}
PARTIAL = [name for name, kind in POSTERIORS.items() if kind.partial]


def partial(architecture="llama", **settings):
    return adapted(architecture, stochastic_layers="last:1", **settings)


@pytest.mark.parametrize("name", PARTIAL)
def test_points_are_the_same_in_every_draw_and_the_rest_is_the_posterior_of_its_own_layers(name):
    posterior = build_posterior(name, LAYERS, seed=3, points=POINTS).eval()
    alone = build_posterior(name, [layer for layer in LAYERS if layer.name not in POINTS], seed=3).eval()
    draws, own = posterior.draw(4, generator(1)), alone.draw(4, generator(1))
    assert set(draws) == {layer.name for layer in LAYERS} and draws.n == 4
    for layer in own:
        assert all(torch.equal(a, b) for a, b in zip(draws[layer], own[layer], strict=True))
    for layer in POINTS:
        assert [factor.shape[0] for factor in draws[layer]] == [1, 1]
        assert torch.equal(draws[layer].A, posterior.mean()[layer].A) and not draws[layer].B.any()
    picked = draws.pick(2)
    assert picked.n == 1 and torch.equal(picked["head"].A[0], draws["head"].A[2])
    assert torch.equal(posterior.kl(draws, generator(2)).total, alone.kl(own, generator(2)).total)
    assert {posterior.kind(n) for n in dict(posterior.named_parameters()) if n.startswith("point_")} == {
        "weights_a",
        "weights_b",
    }


@pytest.mark.parametrize("name", sorted(set(POSTERIORS) - set(PARTIAL)))
def test_others_cover_all_layers(name):
    with pytest.raises(ValueError, match=f"posterior '{name}' covers all layers or none; those that can .* 'inducing'"):
        build_posterior(name, LAYERS, points=POINTS)


def test_it_can_start_from_a_lora_and_moves_the_points_too():
    source = build_posterior("point", LAYERS)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_(generator=generator())
    target = build_posterior("inducing", LAYERS, points=POINTS)
    A, B = (
        tuple(torch.stack([getattr(source.mean()[name], side) for name in group.names]) for group in target.all_groups)
        for side in ("A", "B")
    )
    target.start_from(type(source.mean())(target.all_groups, A, B))
    for layer in LAYERS:
        torch.testing.assert_close(
            target.mean().product(layer.name), source.mean().product(layer.name), atol=1e-3, rtol=1e-3
        )


@pytest.mark.parametrize("architecture", MODELS)
def test_draws_differ_above_the_cut_only_and_share_what_is_below(architecture):
    model, rows, ids = partial(architecture), [], tokens(batch=2)
    layers = model.get_base_model().base_model.h if architecture == "gpt2" else model.get_base_model().model.layers
    for layer in layers:
        layer.register_forward_hook(
            lambda _l, args, out: rows.append((out if torch.is_tensor(out) else out[0]).shape[0])
        )
    with model.draws(3, generator(), fan_out=True):
        logits(model, ids)  # finds out whether the batch may be repeated between layers
        rows.clear()
        once = logits(model, ids)
    assert rows == [2, 6]
    with model.draws(3, generator()):
        torch.testing.assert_close(once, logits(model, ids.repeat(3, 1)), atol=2e-5, rtol=1e-4)
    assert (once[:2] - once[2:4]).abs().max() > 1e-3


def test_everything_is_trained_saved_loaded_and_exported(tmp_path):
    model, ids = partial(init_weights=True), tokens(batch=2)
    model.train()
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        optimiser.zero_grad()
        (model(ids, labels=ids).loss + 1e-3 * model.kl().total).backward()
        optimiser.step()
    holder = find_holder(model)
    points = {n: p for n, p in holder.posterior("default").named_parameters() if n.startswith("point_")}
    assert points and all(p.grad is not None and p.grad.any() for p in points.values())
    model.eval()
    model.save_pretrained(tmp_path / "saved")
    loaded = PeftModel.from_pretrained(base_model(), str(tmp_path / "saved")).eval()
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids))
    assert loaded.peft_config["default"].stochastic_layers == "last:1"
    with model.draws(2, generator(3), fan_out=True):
        want = logits(model, ids)
    for k, path in enumerate(model.export_samples(2, tmp_path / "out", generator(3))[1:]):
        exported = PeftModel.from_pretrained(base_model(), str(path)).eval()
        torch.testing.assert_close(logits(exported, ids), want[2 * k : 2 * k + 2], atol=1e-5, rtol=1e-4)
    mean = logits(model, ids)
    torch.testing.assert_close(logits(model.merge_and_unload(), ids), mean, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"stochastic_layers": "upper"}, "stochastic_layers is 'upper'; give 'all'"),
        ({"stochastic_layers": "last:3"}, "stochastic_layers is 'last:3', but the model has 2 layers"),
        ({"stochastic_layers": "last:1", "target_modules": ["lm_head"]}, "not in one list of layers; use 'all'"),
        (
            {"stochastic_layers": "last:1", "layers_to_transform": [0], "target_modules": ["q_proj"]},
            "leaves no adapted layer",
        ),
        ({"stochastic_layers": "last:1", "posterior": "point"}, "posterior 'point' covers all layers or none"),
    ],
)
def test_what_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        get_peft_model(base_model(), config(**settings))
