"""``lora_dropout``: what PEFT's LoRA does with the same masks, in training only."""

import json

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model

from adapter.cases import adapted, base_model, config, generator, logits, tokens
from bayeslora import BayesLoraConfig, find_holder
from bayeslora.adapter.layer import BayesLoraLinear

P = 0.4
SITE = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "lm_head"], "task_type": "CAUSAL_LM"}


@pytest.fixture
def lora(tmp_path):
    """PEFT's own, with dropout, and where it lies."""
    torch.manual_seed(1)
    model = get_peft_model(base_model(), LoraConfig(**SITE, lora_dropout=P, bias="none", init_lora_weights=False))
    model.save_pretrained(tmp_path / "lora", save_embedding_layers=False)
    return model, str(tmp_path / "lora")


def seeded(model, ids, seed=3):
    torch.manual_seed(seed)
    return model(input_ids=ids, labels=ids)


def test_it_is_what_peft_has_with_the_same_masks(lora):
    theirs, path = lora
    ours = get_peft_model(base_model(), BayesLoraConfig(**SITE, posterior="point", lora_dropout=P, bias="none"))
    ours.start_from_lora(path)
    ids = tokens()
    out = {name: seeded(model.train(), ids) for name, model in (("theirs", theirs), ("ours", ours))}
    torch.testing.assert_close(out["ours"].logits, out["theirs"].logits, atol=2e-5, rtol=1e-4)
    assert (out["ours"].logits - logits(ours.eval())).abs().max() > 1e-2, "something was dropped"
    for result in out.values():
        result.loss.backward()
    name = "model.layers.0.self_attn.q_proj"
    stock = theirs.get_base_model().get_submodule(name)
    posterior = find_holder(ours).posterior("default")
    group = next(group for group in posterior.groups if name in group.names)
    grad = posterior.get_parameter(f"A_{group.key}").grad[group.names.index(name)]
    torch.testing.assert_close(grad, stock.lora_A["default"].weight.grad, atol=1e-6, rtol=1e-3)


def test_nothing_is_dropped_in_evaluation():
    plain, dropping = adapted(), adapted(lora_dropout=P)
    assert torch.equal(logits(plain), logits(dropping))
    with plain.draws(2, generator()), dropping.draws(2, generator()):
        assert torch.equal(logits(plain), logits(dropping))


def test_every_draw_of_a_folded_batch_has_masks_of_its_own():
    """One layer, against its formula: the update of block ``k`` sees the inputs that the mask leaves, with factors ``k``."""
    model = adapted(lora_dropout=P).train()
    layer = next(module for module in model.modules() if isinstance(module, BayesLoraLinear))
    holder = find_holder(model)
    model.draw(2, generator())
    model(input_ids=tokens())  # prepares the factors
    x = torch.ones(4, 5, layer.in_features)
    torch.manual_seed(7)
    got = layer(x)
    torch.manual_seed(7)
    dropped = F.dropout(x, P)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / (1 - P)])
    assert not torch.equal(dropped[:2], dropped[2:])
    A, B = holder.factors("default", layer.name)
    update = torch.cat([block @ A[k].T @ B[k].T for k, block in enumerate(dropped.chunk(2))])
    torch.testing.assert_close(got, layer.base_layer(x) + layer.scaling["default"] * update, atol=1e-5, rtol=1e-4)


def test_the_mean_over_masks_is_what_evaluation_uses():
    model = adapted(lora_dropout=P)
    layer = next(module for module in model.modules() if isinstance(module, BayesLoraLinear))
    model.deterministic()
    model(input_ids=tokens())
    x = torch.randn(1, 3, layer.in_features, generator=generator())
    with torch.no_grad():
        plain = layer(x)
        layer.train()
        torch.manual_seed(0)
        masked = layer(x.expand(20_000, -1, -1)).mean(0)
    torch.testing.assert_close(masked, plain[0], atol=0.03, rtol=0)


def test_each_adapter_has_its_own():
    model = adapted(lora_dropout=P)
    model.add_adapter("other", config(lora_dropout=0.0))
    model.train()
    model.deterministic()
    for name, differ in (("default", True), ("other", False)):
        model.set_adapter(name)
        one, two = (seeded(model, tokens(), seed).logits for seed in (0, 1))
        assert torch.equal(one, two) != differ


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_sees_the_same_masks(reentrant):
    def gradients(model):
        model.zero_grad()
        model.seed_draws(0)
        seeded(model, tokens()).loss.backward()
        return {name: p.grad.clone() for name, p in find_holder(model).named_parameters()}

    model = adapted(lora_dropout=P).train()
    plain = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, plain[name], atol=1e-6, rtol=1e-4)


def test_it_is_saved(tmp_path):
    adapted(lora_dropout=P, bias="none").save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["lora_dropout"] == P and written["bias"] == "none"
    model = PeftModel.from_pretrained(base_model(), tmp_path, is_trainable=True).train()
    model.deterministic()
    assert not torch.equal(seeded(model, tokens(), 0).logits, seeded(model, tokens(), 1).logits)


def test_settings_from_before_there_was_any_are_read_as_none(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    written = json.loads(path.read_text())
    for name in ("lora_dropout", "bias", "base_fingerprint"):
        del written[name]
    path.write_text(json.dumps(written))
    loaded = PeftModel.from_pretrained(base_model(), tmp_path).eval()
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.peft_config["default"].lora_dropout == 0.0
