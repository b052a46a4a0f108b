"""From an ordinary LoRA to a posterior and back, with stock PEFT on the other side."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open

from adapter.cases import MODELS, TARGETS, adapted, base_model, generator, logits
from bayeslora import find_holder
from bayeslora.errors import InputError
from tiers import some

ALL = pytest.mark.parametrize("architecture", MODELS)
TIED_WARNING = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")


def stock_lora(architecture="llama", **settings):
    torch.manual_seed(1)
    given = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS.get(architecture, ["q_proj", "k_proj", "lm_head"])}
    lora = LoraConfig(task_type="CAUSAL_LM", **{"init_lora_weights": False, **given, **settings})
    return get_peft_model(base_model(architecture), lora).eval()


@ALL
@TIED_WARNING
@pytest.mark.parametrize("posterior", ["inducing", "point", "ensemble"])
def test_starting_from_a_lora_adapter(architecture, posterior, tmp_path):
    lora = stock_lora(architecture)
    lora.save_pretrained(tmp_path, save_embedding_layers=False)
    model = adapted(architecture, posterior=posterior)
    model.start_from_lora(str(tmp_path))
    torch.testing.assert_close(logits(model), logits(lora), atol=5e-5, rtol=1e-3)
    if posterior == "inducing":
        with model.draws(1, generator()):
            assert (logits(model) - logits(lora)).abs().max() > 1e-4


@pytest.mark.parametrize(
    "settings",
    [{"r": 2}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}, {"rank_pattern": {"k_proj": 3}}],
)
def test_ranks_and_scalings_of_the_lora_are_honoured(settings, tmp_path):
    lora = stock_lora(**settings)
    lora.save_pretrained(tmp_path, save_embedding_layers=False)
    model = adapted()
    model.start_from_lora(str(tmp_path))
    torch.testing.assert_close(logits(model), logits(lora), atol=5e-5, rtol=1e-3)


@TIED_WARNING
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])  # the second has a tied head
def test_frozen_weights_that_peft_saves_beside_a_lora_are_no_matter(architecture, tmp_path):
    given = {"target_modules": ["lm_head"]}
    lora = stock_lora(architecture, **given)
    lora.save_pretrained(tmp_path, save_embedding_layers=True)
    model = adapted(architecture, **given)
    model.start_from_lora(str(tmp_path))
    torch.testing.assert_close(logits(model), logits(lora), atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("settings", [{"modules_to_save": ["lm_head"]}, {"lora_bias": True}, {"bias": "all"}])
def test_a_lora_that_has_trained_more_than_factors_is_refused(settings, tmp_path):
    architecture = "gpt2" if "bias" in settings else "llama"
    given = {} if architecture == "gpt2" else {"target_modules": ["q_proj", "k_proj"]}
    lora = stock_lora(architecture, **given, **settings)
    with torch.no_grad():
        for parameter in lora.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    lora.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(InputError, match=r"has trained more than its factors, such as .*which would be lost"):
        adapted(architecture, **given).start_from_lora(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"init_lora_weights": "pissa_niter_2"},
            "began with init_lora_weights='pissa_niter_2', which changes the base",
        ),
        ({"init_lora_weights": "olora"}, "began with init_lora_weights='olora', which changes the base"),
        ({"use_dora": True}, "is of the kind DoRA; only plain LoRA"),
        ({"alora_invocation_tokens": [3]}, "is of the kind aLoRA; only plain LoRA"),
    ],
)
def test_a_lora_that_is_more_than_a_product_is_refused(settings, told, tmp_path):
    given = {"target_modules": ["q_proj", "k_proj"]}
    stock_lora(**given, **settings).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=told):
        adapted(**given).start_from_lora(str(tmp_path))


def test_scalings_of_our_own_point_estimate_are_honoured(tmp_path):
    point = adapted(posterior="point", alpha_pattern={"k_proj": 20}, init_weights=False)
    point.save_pretrained(tmp_path, save_embedding_layers=False)
    model = adapted()
    model.start_from_lora(str(tmp_path))
    torch.testing.assert_close(logits(model), logits(point), atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("more", "told"),
    [({"snapshots": 4, "members": 3}, "has snapshots"), ({"modules_to_save": ["lm_head"]}, "has trained lm_head")],
)
def test_an_own_adapter_that_is_more_than_a_lora_is_refused(more, told, tmp_path):
    adapted(posterior="point", target_modules=["q_proj"], **more).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"{told} besides one LoRA; only plain LoRA can be started from"):
        adapted(posterior="meanfield", target_modules=["q_proj"]).start_from_lora(str(tmp_path))


def test_a_lora_that_does_not_fit_is_refused(tmp_path):
    stock_lora(r=8).save_pretrained(tmp_path / "large", save_embedding_layers=False)
    with pytest.raises(InputError, match=r"has rank 8 in .* above ours, 4; set r=8"):
        adapted().start_from_lora(str(tmp_path / "large"))
    stock_lora(target_modules=["q_proj"]).save_pretrained(tmp_path / "few")
    with pytest.raises(InputError, match="adapts 2 layers and this one 5"):
        adapted().start_from_lora(str(tmp_path / "few"))
    adapted().save_pretrained(tmp_path / "ours")
    with pytest.raises(InputError, match="only plain LoRA can be started from"):
        adapted().start_from_lora(str(tmp_path / "ours"))


@ALL
@TIED_WARNING
@pytest.mark.parametrize("posterior", some(["inducing", "ensemble"], ["inducing"]))
def test_exported_draws_equal_the_draws(architecture, posterior, tmp_path):
    model = adapted(architecture, posterior=posterior)
    paths = model.export_samples(2, tmp_path / "out", generator(3))
    assert [p.name for p in paths] == ["mean", "sample-000", "sample-001"]
    expected = [logits(model)]
    with model.draws(2, generator(3)):
        ids = torch.cat([expected_ids(), expected_ids()])
        expected += list(logits(model, ids).chunk(2))
    for path, want in zip(paths, expected, strict=True):
        stock = PeftModel.from_pretrained(base_model(architecture), path).eval()
        assert stock.peft_config["default"].peft_type == "LORA"
        torch.testing.assert_close(logits(stock), want, atol=1e-5, rtol=1e-4)


def test_the_same_draws_are_the_same_files(tmp_path):
    """Metadata of safetensors come in another order every time, unless they are sorted."""
    model = adapted()
    model.peft_config["default"].base_fingerprint = "1:exact:0"
    files = [
        model.export_samples(1, tmp_path / str(k), generator(3))[1] / "adapter_model.safetensors" for k in range(8)
    ]
    assert len({file.read_bytes() for file in files}) == 1
    with safe_open(files[0], framework="pt") as read:
        assert read.metadata() == {"base_fingerprint": "1:exact:0", "format": "pt"}


@pytest.mark.parametrize("training", [False, True])
def test_exporting_draws_whole_networks_and_leaves_the_mode_as_it_was(training, tmp_path):
    """BLoB's draws have signs for every token while it is trained, which no adapter can hold."""
    model = adapted(posterior="blob").train(training)
    paths = model.export_samples(2, tmp_path / "out", generator(3))
    assert len(paths) == 3 and find_holder(model).posterior("default").training == training


def expected_ids():
    from adapter.cases import tokens

    return tokens()


@pytest.mark.parametrize("rank, served", [(4, 8), (8, 8), (9, 16)])
def test_exported_ranks_are_ones_a_server_accepts(rank, served, tmp_path):
    model = adapted(r=rank, lora_alpha=2 * rank)
    (path,) = model.export_samples(0, tmp_path / "out")
    written = json.loads((path / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (served, served)
    assert written["modules_to_save"] is None
    stock = PeftModel.from_pretrained(base_model(), path).eval()
    torch.testing.assert_close(logits(stock), logits(model), atol=1e-5, rtol=1e-4)


def test_exported_targets_name_exactly_the_adapted_layers(tmp_path):
    (path,) = adapted().export_samples(0, tmp_path / "all")
    assert sorted(json.loads((path / "adapter_config.json").read_text())["target_modules"]) == [
        "k_proj",
        "lm_head",
        "q_proj",
    ]
    model = adapted(target_modules=["q_proj"], layers_to_transform=[1])
    (path,) = model.export_samples(0, tmp_path / "some")
    assert json.loads((path / "adapter_config.json").read_text())["target_modules"] == [
        "model.layers.1.self_attn.q_proj"
    ]
    stock = PeftModel.from_pretrained(base_model(), path).eval()
    torch.testing.assert_close(logits(stock), logits(model), atol=1e-5, rtol=1e-4)


def test_exports_that_cannot_be_are_refused(tmp_path):
    model = adapted()
    model.export_samples(0, tmp_path / "out")
    with pytest.raises(InputError, match="is not empty; choose another directory"):
        model.export_samples(0, tmp_path / "out")
    saving = adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(InputError, match=r"modules_to_save=.* cannot be exported"):
        saving.export_samples(1, tmp_path / "other")
    embedding = adapted(target_modules=["q_proj"], trainable_token_indices=[1, 2])
    with pytest.raises(InputError, match=r"trainable_token_indices=.* cannot be exported"):
        embedding.export_samples(1, tmp_path / "other")
