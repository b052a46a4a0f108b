"""Mixtures over snapshots as PEFT adapters: in a loop of one's own, saved, loaded, merged, exported."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from adapter.cases import adapted, base_model, generator, logits, tokens
from bayeslora import BayesLoraConfig, find_holder


def trained(posterior="decoupled", steps=4, **settings):
    """A mixture of two snapshots that differ, after steps of plain gradient descent."""
    model = adapted(posterior=posterior, snapshots=4, members=2, init_weights=True, **settings)
    model.seed_draws(0)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model.train()
    for step in range(1, steps + 1):
        optimiser.zero_grad()
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        optimiser.step()
        model.after_step(step, steps)
    return model.eval()


@pytest.mark.parametrize("posterior", ["decoupled", "point", "blob"])
def test_a_mixture_is_saved_and_loaded(posterior, tmp_path):
    model = trained(posterior)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base_model(), tmp_path).eval()
    assert find_holder(again).posterior("default").held == 2
    assert torch.equal(logits(model), logits(again))
    draws = []
    for it in (model, again):
        with it.draws(4, generator()):
            draws.append(logits(it))
    assert torch.equal(*draws)


def test_merging_adds_the_average_of_the_snapshots():
    model = trained("point")
    mean = logits(model)
    posterior = find_holder(model).posterior("default")
    products = [
        posterior.get_buffer("kept_B_32x32_r4")[0, k] @ posterior.get_buffer("kept_A_32x32_r4")[0, k] for k in (0, 1)
    ]
    name = posterior.groups[0].names[0]
    torch.testing.assert_close(posterior.mean().product(name)[0], sum(products) / 2)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), mean, rtol=1e-4, atol=1e-4)


def test_exported_draws_are_those_of_the_snapshots(tmp_path):
    model = trained("point")
    model.export_samples(2, tmp_path / "out")
    posterior = find_holder(model).posterior("default")
    kept = posterior.get_buffer("kept_A_32x32_r4")[0]
    key = f"base_model.model.{posterior.groups[0].names[0]}.lora_A.weight"
    files = [tmp_path / "out" / f"sample-{k:03d}" / "adapter_model.safetensors" for k in range(2)]
    first = [load_file(path)[key] for path in files]
    assert not torch.equal(*first)
    assert sorted(float(it[0, 0]) for it in first) == pytest.approx(sorted(float(it[0, 0]) for it in kept))


def test_checkpoint_ensembles_of_earlier_versions_load(tmp_path):
    """Their snapshots were a posterior of its own, with the same tensors."""
    model = trained("point")
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    del config["snapshots"], config["members"]
    path.write_text(json.dumps(config | {"posterior": "snapshots", "settings": {"members": 2, "snapshots": 4}}))
    again = PeftModel.from_pretrained(base_model(), tmp_path).eval()
    assert torch.equal(logits(model), logits(again))
    loaded = again.peft_config["default"]
    assert (loaded.posterior, loaded.snapshots, loaded.members, loaded.settings) == ("point", 4, 2, {})


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="members must be at least 1 and at most snapshots"):
        BayesLoraConfig(snapshots=2, members=3)
    with pytest.raises(ValueError, match="depends on the input, so snapshots of it have no common mean"):
        adapted(posterior="contextual", snapshots=2, members=1)
