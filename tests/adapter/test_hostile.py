"""Adapter directories that somebody wrote to do harm, or that were damaged: refused in one line, and soon."""

import json
import re
import time

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from adapter.cases import adapted, base_model, config
from bayeslora.adapter import expressions
from bayeslora.adapter.expressions import require_quick
from bayeslora.adapter.loading import load_adapter
from bayeslora.errors import InputError
from bayeslora.posterior.registry import POSTERIORS

NAMES = [name for name, _ in base_model().named_modules()]
FOR_EVER = [r"(\w+\.?)+!", "(.|.)*!", "(.*)*!", ".*.*.*.*.*.*.*.*.*.*.*.*!"]


@pytest.fixture
def saved(tmp_path):
    adapted().save_pretrained(tmp_path)
    return tmp_path


def edit(place, **changes):
    path = place / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change(place, action):
    """Change the first tensor of a file, by name; returns that name."""
    path = place / "adapter_model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    tensors[name] = action(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    return name


def refusal(place):
    with pytest.raises(InputError) as caught:
        load_adapter(base_model(), place)
    line = str(caught.value)
    assert "\n" not in line and line.startswith(str(place))
    return line


# Sizes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_large_tensors(monkeypatch):
    """Fails where memory is taken for what the settings say: the sizes below are of gigabytes."""
    build = torch.rand

    def rand(*size, **options):
        shape = size[0] if isinstance(size[0], tuple) else size
        assert torch.Size(shape).numel() < 1e6 or torch._guards.detect_fake_mode() is not None
        return build(*size, **options)

    monkeypatch.setattr(torch, "rand", rand)


@pytest.mark.usefixtures("no_large_tensors")
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"r": 20_000}, "rank 20000 is more than model.layers.0.self_attn.q_proj has use for"),
        ({"rank_pattern": {"lm_head": 20_000}}, "rank 20000 is more than lm_head has use for"),
        ({"r": 30}, r"lacks a tensor of the adapter, .*_r30', which is 2x30x30 by adapter_config.json \(r=30\)"),
        (
            {"settings": {"flow_hidden": 10**6}},
            "holds .* for a tensor of the adapter, .*flow_.* by adapter_config.json",
        ),
        (
            {"settings": {"inducing_rows": 10**9}},
            "holds 2x4x4 for a tensor of the adapter, .*, which is 2x1000000000x4 by",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:inducing size")
def test_settings_that_ask_for_more_than_the_file_holds(saved, settings, message):
    edit(saved, **settings)
    assert re.search(message, refusal(saved))


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_whatever_fits_is_loaded(posterior, tmp_path):
    """What is expected of the file is what the posterior then is."""
    adapted(posterior=posterior, target_modules=["q_proj", "k_proj"]).save_pretrained(tmp_path)
    load_adapter(base_model(), tmp_path)


@pytest.mark.parametrize("settings", [{"whitened": False}, {"share_inducing": True}, {"flow_depth": 0}])
def test_whatever_fits_is_loaded_with_other_settings(settings, tmp_path):
    adapted(settings=settings).save_pretrained(tmp_path)
    load_adapter(base_model(), tmp_path)


# Expressions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(expressions, "SECONDS", 1.0)


@pytest.mark.system
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("expression", FOR_EVER)
def test_expressions_that_take_for_ever(expression):
    began = time.monotonic()
    message = re.escape(f"{expression!r} takes too long to match with names of modules; list the names")
    with pytest.raises(InputError, match=message):
        require_quick(["q_proj", r".*\.q_proj", expression], NAMES)
    assert time.monotonic() - began < 20


@pytest.mark.system
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": FOR_EVER[0]},
        {"exclude_modules": FOR_EVER[0]},
        {"rank_pattern": {FOR_EVER[0]: 4}},
        {"alpha_pattern": {FOR_EVER[0]: 4}},
    ],
)
def test_no_setting_takes_for_ever(settings, saved):
    edit(saved, **settings)
    assert "takes too long to match" in refusal(saved)
    with pytest.raises(InputError, match="takes too long to match"):
        PeftModel.from_pretrained(base_model(), saved)


@pytest.mark.parametrize("expression", ["(", "a{99999999999999999999}", "x" * 20_000 + "(a)"])
def test_expressions_that_are_none(expression, saved):
    edit(saved, target_modules=expression)
    assert re.search("no regular expression for names of modules|has 20003 letters", refusal(saved))


@pytest.mark.parametrize("name", ["layers_pattern", "modules_to_save"])
def test_names_are_no_expressions(name, saved):
    edit(saved, **{name: [FOR_EVER[0]], "layers_to_transform": [0]})
    assert "which is no name of a module" in refusal(saved)


def test_names_need_no_process(monkeypatch):
    monkeypatch.setattr(expressions.subprocess, "run", lambda *args, **options: pytest.fail("a process was started"))
    require_quick(["q_proj", "model.layers.0.self_attn.q_proj", "block-3"], NAMES)
    get_peft_model(base_model(), config(target_modules="lm_head", rank_pattern={"lm_head": 2}))


@pytest.mark.parametrize(
    "expression",
    [
        r".*\.(q|v)_proj",
        r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.(?:(?:gate_proj)))",
        r"^(?!.*vision).*\.(?:q_proj|k_proj)$",
    ],
)
def test_expressions_that_people_write(expression):
    require_quick([expression], [f"model.layers.{k}.{name}" for k in range(99) for name in NAMES])


# Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_are_named(value, saved):
    def spoil(tensor):
        tensor.view(-1)[-1] = value
        return tensor

    name = change(saved, spoil)
    assert f"adapter_model.safetensors: tensor {name!r} holds NaN or infinity" in refusal(saved)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.complex64])
def test_other_types_are_not_cast_without_a_word(dtype, saved):
    name = change(saved, lambda tensor: tensor.to(dtype)).rpartition(".")[2]
    kind = str(dtype).removeprefix("torch.")
    message = rf"tensor '.*{name}' is of type {kind}, and an adapter's are floats"
    assert re.search(message, refusal(saved))
    with pytest.raises(InputError, match=message):
        PeftModel.from_pretrained(base_model(), saved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_fine(dtype, saved):
    change(saved, lambda tensor: tensor.to(dtype))
    load_adapter(base_model(), saved)


@pytest.mark.parametrize(
    "action, message", [(lambda t: t.to(torch.int32), "is of type int32"), (lambda t: t / 0, "holds NaN")]
)
def test_a_lora_to_start_from_is_looked_at_too(action, message, tmp_path):
    adapted(posterior="point").save_pretrained(tmp_path)
    change(tmp_path, action)
    with pytest.raises(InputError, match=message):
        adapted().start_from_lora(str(tmp_path))


def test_a_posterior_that_broke_is_not_exported(tmp_path):
    model = adapted(posterior="point")
    with torch.no_grad():
        next(iter(model.base_model.holder.parameters()))[1, 0] = torch.nan
    with pytest.raises(InputError, match=r"mean of adapter 'default': tensor '.*lora_A.weight' holds NaN or infinity"):
        model.export_samples(1, tmp_path / "out")
