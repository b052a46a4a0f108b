"""Merging the posterior mean into the base weights, and taking it out again to the bit."""

import pytest
import torch

from adapter.cases import MODELS, TIED, adapted, base_model, config, logits, tokens
from bayeslora import find_holder

ALL = pytest.mark.parametrize("architecture", MODELS)
UNTIES = pytest.mark.filterwarnings("ignore:merging unties", "ignore:Input and output embeddings")


def base_weights(model):
    return {k: v.clone() for k, v in model.state_dict().items() if "posterior" not in k}


@ALL
@UNTIES
@pytest.mark.parametrize("posterior", ["inducing", "point", "ensemble"])
def test_merge_equals_deterministic_mode_and_unmerge_is_exact(architecture, posterior):
    model = adapted(architecture, posterior=posterior)
    weights, before = base_weights(model), logits(model)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), before, atol=3e-5, rtol=1e-4)
    head = model.get_base_model().lm_head
    assert not torch.equal(head.weight, weights["base_model.model.lm_head.base_layer.weight"])
    model.unmerge_adapter()
    assert torch.equal(logits(model), before)
    for name, weight in base_weights(model).items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("architecture", TIED)
def test_merging_a_tied_head_leaves_the_embedding_alone(architecture):
    model = adapted(architecture)
    embedding = model.get_input_embeddings().weight
    head = model.get_base_model().lm_head
    assert head.weight is embedding
    before = embedding.clone()
    with pytest.warns(UserWarning, match="merging unties lm_head from the input embedding"):
        model.merge_adapter()
    assert model.get_input_embeddings().weight is embedding
    assert torch.equal(embedding, before)
    assert head.weight is not embedding
    model.unmerge_adapter()
    assert head.weight is embedding


@ALL
@UNTIES
def test_merge_and_unload_leaves_a_plain_model(architecture):
    model = adapted(architecture)
    before = logits(model)
    merged = model.merge_and_unload(safe_merge=True)
    torch.testing.assert_close(logits(merged), before, atol=3e-5, rtol=1e-4)
    assert set(merged.state_dict()) == set(base_model(architecture).state_dict())
    assert not merged._forward_pre_hooks and not merged._forward_hooks
    assert merged.config.tie_word_embeddings is False


@ALL
@UNTIES
def test_a_merged_model_saves_and_loads_like_any_other(architecture, tmp_path):
    merged = adapted(architecture).merge_and_unload()
    merged.save_pretrained(tmp_path)
    torch.testing.assert_close(
        logits(type(merged).from_pretrained(tmp_path).eval()), logits(merged), atol=1e-5, rtol=1e-4
    )


@ALL
def test_unload_gives_the_base_model_back(architecture):
    model = adapted(architecture)
    plain = model.unload()
    assert torch.equal(logits(plain), logits(base_model(architecture)))
    assert set(plain.state_dict()) == set(base_model(architecture).state_dict())


@UNTIES
def test_merging_twice_is_refused():
    model = adapted()
    model.merge_adapter()
    once = logits(model)
    with pytest.warns(UserWarning, match="All adapters are already merged, nothing to do"):
        model.merge_adapter()
    assert torch.equal(once, logits(model))


@UNTIES
def test_two_adapters_merge_together_and_apart():
    model = adapted()
    model.add_adapter("other", config(seed=5))
    expected = {}
    for active in (["default"], ["other"], ["default", "other"]):
        model.base_model.set_adapter(active)
        expected[tuple(active)] = logits(model)
    assert not torch.equal(expected[("default",)], expected[("other",)])
    for active, want in expected.items():
        model.base_model.merge_adapter(list(active))
        torch.testing.assert_close(logits(model), want, atol=5e-5, rtol=1e-4)
        model.unmerge_adapter()


def test_safe_merge_refuses_nan():
    model = adapted()
    with torch.no_grad():
        find_holder(model).posterior("default").get_parameter("mean_4x4").fill_(float("nan"))
    weights = base_weights(model)
    with pytest.raises(
        ValueError, match=r"NaNs detected in the merged weights\. The adapter default seems to be broken"
    ):
        model.merge_adapter(safe_merge=True)
    for name, weight in base_weights(model).items():
        assert torch.equal(weight, weights[name])


def test_safe_merge_refuses_a_posterior_that_has_no_mean():
    """NaN in every parameter: its kernels cannot even be factorised."""
    model = adapted()
    with torch.no_grad():
        for parameter in find_holder(model).parameters():
            parameter[0] = torch.nan
    for _ in range(2):  # and nothing is left half done
        with pytest.raises(
            ValueError, match=r"NaNs detected in the merged weights\. The adapter default seems to be broken"
        ):
            model.merge_and_unload(safe_merge=True)


def test_safe_merge_refuses_a_base_weight_of_nan():
    model = adapted()
    with torch.no_grad():
        model.get_base_model().lm_head.base_layer.weight[3, 4] = torch.inf
    with pytest.raises(ValueError, match=r"NaNs detected in the merged weights.* or the weight of lm_head"):
        model.merge_adapter(safe_merge=True)


@UNTIES
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])  # the second has a tied head
def test_a_model_that_was_cast_while_it_was_merged_can_be_unmerged(architecture):
    want = logits(adapted(architecture).to(torch.bfloat16))
    model = adapted(architecture)
    model.merge_adapter()
    model.to(torch.bfloat16)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), want, rtol=0.05, atol=0.05)


def test_several_adapters_merge_at_once():
    model = adapted()
    model.add_adapter("other", config())
    model.base_model.set_adapter(["default", "other"])
    together = logits(model)
    merged = model.merge_and_unload(adapter_names=["other", "default"])
    torch.testing.assert_close(logits(merged), together, atol=5e-5, rtol=1e-4)


@UNTIES
def test_draws_of_a_merged_adapter_are_refused():
    model = adapted()
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merged into the base weights; call unmerge_adapter\(\)"):
        model.draw(2)


@UNTIES
def test_training_a_merged_adapter_is_refused():
    """It would get no gradient of the loss, and ``elbo`` would train the KL alone."""
    model, ids = adapted(), tokens()
    model.merge_adapter()
    merged = logits(model.train())  # without gradients nothing is trained
    assert torch.equal(model.eval()(ids).logits, merged)
    with pytest.raises(ValueError, match=r"merged into the base weights .* call unmerge_adapter\(\) before training"):
        model.train()(ids)
    model.unmerge_adapter()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in find_holder(model).parameters())


@UNTIES
def test_a_merged_adapter_that_is_frozen_is_no_matter_in_training():
    model = adapted(inference_mode=True)
    model.merge_adapter()
    assert torch.equal(model.train()(tokens()).logits, logits(model.eval()))


@UNTIES
def test_disabling_a_merged_adapter_unmerges_it():
    model = adapted()
    before = logits(model)
    model.merge_adapter()
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(base_model()), atol=0, rtol=0)
    assert torch.equal(logits(model), before)


@UNTIES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_merged_in_full_precision(dtype):
    model = adapted().to(dtype)
    layer = model.get_base_model().lm_head
    want = (layer.weight.float() + layer.get_delta_weight("default")).to(dtype)
    original = layer.weight.clone()
    model.merge_adapter()
    assert torch.equal(layer.weight, want)
    model.unmerge_adapter()
    assert torch.equal(layer.weight, original)
