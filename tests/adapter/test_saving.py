"""Saving and loading by every door a PEFT or transformers user may take."""

import json
import os
import subprocess
import sys

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from adapter.cases import MODELS, adapted, base_model, config, generator, logits
from bayeslora import BayesLoraConfig, find_holder
from bayeslora.errors import InputError
from bayeslora.posterior import InducingConfig
from tiers import some

ALL = pytest.mark.parametrize("architecture", MODELS)


@pytest.fixture
def saved(request, tmp_path):
    """An adapter on disk, beside the base model it belongs to."""
    architecture = getattr(request, "param", "llama")
    base = tmp_path / "base"
    base_model(architecture).save_pretrained(base)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config(architecture)).eval()
    model.posterior_scale = 1.5
    model.save_pretrained(tmp_path / "adapter")
    return model, base, tmp_path / "adapter"


def drawn(model):
    with model.draws(2, generator()):
        return logits(model)


def same(model, other):
    assert torch.equal(logits(model), logits(other))
    assert torch.equal(drawn(model), drawn(other))


@pytest.mark.parametrize("saved", some(MODELS, ["llama", "gpt2"]), indirect=True)
def test_every_way_of_loading_gives_the_same_predictions(saved):
    model, base, path = saved
    plain = AutoModelForCausalLM.from_pretrained
    assert isinstance(PeftConfig.from_pretrained(path), BayesLoraConfig)
    same(model, PeftModel.from_pretrained(plain(base), path).eval())
    same(model, PeftModel.from_pretrained(plain(base), path, adapter_name="other", low_cpu_mem_usage=True).eval())
    same(model, AutoPeftModelForCausalLM.from_pretrained(path).eval())
    trainable = PeftModel.from_pretrained(plain(base), path, is_trainable=True)
    assert all(p.requires_grad for p in find_holder(trainable).parameters())


@pytest.mark.parametrize("saved", some(MODELS, ["qwen3"]), indirect=True)
def test_transformers_loads_it_without_a_peft_model(saved):
    model, base, path = saved
    for native in (
        AutoModelForCausalLM.from_pretrained(path).eval(),
        AutoModelForCausalLM.from_pretrained(base).eval(),
    ):
        if not hasattr(native, "peft_config"):
            native.load_adapter(str(path))
        torch.testing.assert_close(logits(native), logits(model), atol=0, rtol=0)
        holder = find_holder(native)
        holder.draw(2, generator())
        torch.testing.assert_close(logits(native), drawn(model), atol=0, rtol=0)
        holder.automatic()
        native.disable_adapters()
        torch.testing.assert_close(logits(native), logits(base_model(model.config.model_type)), atol=0, rtol=0)


def test_transformers_adds_switches_and_deletes_adapters():
    native = base_model()
    native.add_adapter(config(), "first")
    native.add_adapter(config(seed=3), "second")
    native.eval()
    answers = {}
    for name in ("first", "second"):
        native.set_adapter(name)
        answers[name] = logits(native)
    assert not torch.equal(answers["first"], answers["second"])
    native.delete_adapter("second")
    native.set_adapter("first")
    assert torch.equal(logits(native), answers["first"])
    assert list(find_holder(native).bayeslora_posterior) == ["first"]


@pytest.mark.parametrize("training", [False, True])
def test_an_adapter_that_transformers_adds_has_the_mode_of_its_model(training):
    """There is no ``PeftModel`` around it that could be in another one."""
    native = base_model().train(training)
    native.add_adapter(config(lora_dropout=0.5))
    assert torch.equal(logits(native), logits(native)) is not training
    assert {module.training for module in native.modules()} == {training}


@ALL
def test_the_file_holds_the_posterior_and_nothing_else(architecture, tmp_path):
    """Not the frozen head, though it is adapted; nothing of the size of the factors' draws."""
    model = adapted(architecture)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    posterior = find_holder(model).posterior("default")
    expected = {
        f"base_model.model.weight_posterior.bayeslora_posterior.{name}": value
        for name, value in posterior.state_dict().items()
    }
    assert set(tensors) == set(expected)
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert size < 4 * posterior.parameter_count() + 8192


def test_the_directory_is_complete_and_has_a_model_card(saved):
    _, _, path = saved
    assert {p.name for p in path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    card = (path / "README.md").read_text()
    assert "library_name: peft" in card
    written = json.loads((path / "adapter_config.json").read_text())
    assert written["peft_type"] == "BAYESLORA"
    assert written["posterior_scale"] == 1.5
    assert written["layer_names"][0] == "model.layers.0.self_attn.q_proj"


@pytest.mark.system
def test_a_fresh_process_needs_only_bayeslora_and_peft(saved, tmp_path):
    model, base, path = saved
    save_file({"logits": drawn(model)}, tmp_path / "expected.safetensors")
    script = f"""
import bayeslora, torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from adapter.cases import logits, generator
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({str(base)!r}), {str(path)!r}).eval()
with model.draws(2, generator()):
    got = logits(model)
assert torch.equal(got, load_file({str(tmp_path / "expected.safetensors")!r})["logits"])
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=_environment(), check=False
    )
    assert result.returncode == 0, result.stderr


def _environment():
    """This process's own, with the tests' helpers importable."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_settings_survive_as_a_dataclass_or_a_dictionary(tmp_path):
    given = InducingConfig(flow_depth=2, inducing_rows=3, share_inducing=True)
    model = adapted(settings=given)
    model.save_pretrained(tmp_path)
    loaded = BayesLoraConfig.from_pretrained(tmp_path)
    assert loaded.settings["flow_depth"] == 2
    assert loaded.settings == model.peft_config["default"].settings
    same(model, PeftModel.from_pretrained(base_model(), tmp_path).eval())


def test_modules_to_save_travel_along(tmp_path):
    model = adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    assert any("lm_head" in key for key in load_file(tmp_path / "adapter_model.safetensors"))
    same(model, PeftModel.from_pretrained(base_model(), tmp_path).eval())


def test_trainable_tokens_travel_along(tmp_path):
    model = adapted(target_modules=["q_proj"], trainable_token_indices=[3, 5])
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        embedding.token_adapter.trainable_tokens_delta["default"].add_(1.0)
    model.save_pretrained(tmp_path)
    same(model, PeftModel.from_pretrained(base_model(), tmp_path).eval())


def test_a_posterior_that_was_offloaded_is_told_of():
    """Which accelerate does to what comes last in a model. It brings back only what is called."""
    model = adapted()
    find_holder(model).to("meta")
    for use in (lambda: logits(model), model.draw):
        with pytest.raises(
            RuntimeError, match=r"of adapter 'default' are not in memory: .* 'base_model\.model\.weight_post"
        ):
            use()


def test_a_file_that_fits_no_adapter_of_its_name_is_refused(tmp_path):
    """PEFT would leave it out without a word, and keep the values that are there."""
    adapted(r=2).save_pretrained(tmp_path)
    model = adapted(r=4)
    before = logits(model)
    with pytest.raises(InputError, match=r"is no tensor of the adapter of this name, .*: load it as another adapter"):
        model.load_adapter(tmp_path, "default")
    assert torch.equal(logits(model.eval()), before)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "r": 4}))
    with pytest.raises(InputError, match=r"or with the adapter_config\.json that was saved with it"):
        PeftModel.from_pretrained(base_model(), tmp_path)


def test_inference_mode_freezes():
    model = adapted(inference_mode=True)
    assert not any(p.requires_grad for p in model.parameters())


def test_half_precision_storage():
    default = get_peft_model(base_model().bfloat16(), config())
    kept = get_peft_model(base_model().bfloat16(), config(), autocast_adapter_dtype=False)
    assert {p.dtype for p in find_holder(default).parameters()} == {torch.float32}
    assert {p.dtype for p in find_holder(kept).parameters()} == {torch.bfloat16}
    for model in (default, kept):
        assert logits(model.eval()).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_of_the_model_keeps_variances(dtype):
    """Those of SWAG are below the smallest number of float16; curvatures are above its largest."""
    swag = adapted(posterior="swag", init_weights=True).train()
    for step in range(1, 5):
        with torch.no_grad():
            for k, parameter in enumerate(find_holder(swag).parameters()):
                parameter += 1e-5 * torch.randn(parameter.shape, generator=generator(10 * step + k))
        swag.after_step(step, 4)
    laplace = adapted(posterior="laplace")
    for name, buffer in find_holder(laplace).named_buffers():
        if "values" in name:
            buffer.fill_(1e6)
    for model in (swag.eval(), laplace):
        posterior = find_holder(model).posterior("default")
        before = [stack.std(1) for stack in posterior.draw(20, generator()).A]
        model.to(dtype)
        after = [stack.std(1) for stack in posterior.draw(20, generator()).A]
        torch.testing.assert_close(after, before, rtol=0.01, atol=0)
        assert {p.dtype for p in posterior.parameters()} == {logits(model).dtype} == {dtype}
        model.double()
        assert {b.dtype for b in posterior.buffers() if b.is_floating_point()} == {torch.float64}


def test_layers_are_stacked_in_the_order_that_was_saved():
    """A model that lists its layers in another order must still give each layer its own factors."""
    settings = {"flow_depth": 0}  # with a flow, the mean is an average over noise that depends on the order
    model = adapted(settings=settings)
    posterior = find_holder(model).posterior("default")
    reordered = [layer.name for layer in posterior.layers][::-1]
    shuffled = adapted(settings=settings, layer_names=reordered)
    other = find_holder(shuffled).posterior("default")
    assert [layer.name for layer in other.layers] == reordered
    # rows of every stacked tensor, permuted to the other order, describe the same model
    groups = {group.key: group for group in posterior.groups}
    state = posterior.state_dict()
    for key in state:
        if key.endswith("_4x4"):
            state[key] = state[key][_latent_rows(posterior, other)]
        else:
            group = next(group for group in other.groups if key.endswith(f"_{group.key}"))
            state[key] = state[key][[groups[group.key].names.index(name) for name in group.names]]
    other.load_state_dict(state)
    torch.testing.assert_close(logits(shuffled), logits(model))


def _latent_rows(source, target):
    """Row of the source's latent stack for each row of the target's."""

    def rows(posterior):
        return {
            (block.factor, name): block.rows.start + k
            for block in posterior._blocks
            for k, name in enumerate(block.group.names)
        }

    old, new = rows(source), rows(target)
    return [old[key] for key, _ in sorted(new.items(), key=lambda item: item[1])]
