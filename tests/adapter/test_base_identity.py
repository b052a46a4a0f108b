"""Which base model an adapter belongs to: its fingerprint, and the name it is saved with."""

import json
import warnings

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn

from adapter.cases import MODELS, adapted, base_model, config, logits
from bayeslora import load_model, load_run
from bayeslora.adapter.base_fingerprint import differ, fingerprint_of
from bayeslora.adapter.identity import OtherBaseWarning
from bayeslora.train import train
from train import tiny

PRECISIONS = [torch.float32, torch.bfloat16, torch.float64]


def other_base():
    """Of the same shape, with a single weight changed as training would."""
    model = base_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    return model


def complaints(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(it.message) for it in caught if issubclass(it.category, OtherBaseWarning)]


# Fingerprints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", MODELS)
def test_the_same_model_has_the_same_in_every_precision_that_can_be_compared(architecture):
    (one, *others) = (fingerprint_of(base_model(architecture).to(precision)) for precision in PRECISIONS)
    assert one is not None and all(it == one for it in others)
    half = fingerprint_of(base_model(architecture).half())
    assert half != one and not differ(half, one)
    assert fingerprint_of(base_model(architecture).half()) == half


def test_another_model_has_another():
    one = fingerprint_of(base_model())
    assert differ(one, fingerprint_of(other_base()))
    assert differ(one, fingerprint_of(base_model("qwen3")))


@pytest.mark.parametrize("end", [0, -1])
def test_changes_at_both_ends_of_a_weight_are_seen(end):
    net = nn.Sequential(nn.Linear(50, 40))
    before = fingerprint_of(net)
    with torch.no_grad():
        net[0].weight.view(-1)[end] += 0.5
    assert differ(before, fingerprint_of(net))


@pytest.mark.parametrize(
    "net",
    [
        nn.Linear(2, 2, device="meta"),
        nn.ParameterDict({"w": nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)}),
        nn.ParameterDict({"w": nn.Parameter(torch.zeros(0))}),
        nn.Identity(),
    ],
)
def test_what_cannot_be_read_has_none(net):
    assert fingerprint_of(net) is None


# Adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    adapted().save_pretrained(tmp_path)
    return tmp_path


def edit(place, **changes):
    path = place / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(base, place, **options):
    return lambda: PeftModel.from_pretrained(base, place, **options)


def test_an_adapter_keeps_that_of_its_base(saved):
    written = json.loads((saved / "adapter_config.json").read_text())
    assert written["base_fingerprint"] == fingerprint_of(base_model())


@pytest.mark.parametrize("options", [{}, {"is_trainable": True}, {"low_cpu_mem_usage": True}])
def test_another_base_of_the_same_shape_is_told_of(saved, options):
    edit(saved, base_model_name_or_path="org/right-one")
    (line,) = complaints(load(other_base(), saved, **options))
    assert "trained on another base model than this one" in line and "load org/right-one" in line


@pytest.mark.parametrize("precision", [*PRECISIONS, torch.float16])
def test_nothing_is_told_of_the_same_base_in_another_precision(saved, precision):
    assert not complaints(load(base_model().to(precision), saved))


def test_nothing_is_told_where_nothing_is_known(saved, tmp_path):
    edit(saved, base_fingerprint=None)
    assert not complaints(load(other_base(), saved))
    model = PeftModel.from_pretrained(other_base(), saved)
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["base_fingerprint"] is None


def test_a_second_adapter_is_compared_with_the_bare_base(saved):
    assert not complaints(lambda: adapted().load_adapter(saved, "other"))
    model = get_peft_model(other_base(), config())
    assert len(complaints(lambda: model.load_adapter(saved, "other"))) == 1


def test_settings_may_be_used_again_for_another_base():
    settings = config()
    get_peft_model(base_model(), settings)
    assert not complaints(lambda: get_peft_model(other_base(), settings))
    assert settings.base_fingerprint == fingerprint_of(other_base())


def test_transformers_tells_it_too(saved):
    assert len(complaints(lambda: other_base().load_adapter(str(saved)))) == 1
    assert not complaints(lambda: base_model().load_adapter(str(saved)))


def test_a_run_tells_that_its_base_was_replaced(tmp_path):
    base, run = tmp_path / "model", tmp_path / "run"
    loaded = load_model(tiny.model_directory(), device="cpu")
    loaded.model.save_pretrained(base)
    loaded.tokenizer.save_pretrained(base)
    with tiny.without_intervals():
        train(tiny.run_config(model=str(base)), run)
    ask = ("Is it even?", ["yes", "no"])
    assert not complaints(lambda: load_run(run, device="cpu").ask(*ask))
    with torch.no_grad():
        loaded.model.lm_head.weight.mul_(1.5)
    loaded.model.save_pretrained(base)
    assert len(complaints(lambda: load_run(run, device="cpu").ask(*ask))) == 1


# Names ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lying_in_a_cache(tmp_path):
    """A base model that lies in somebody's cache, and has a name that everybody knows it by."""
    place = tmp_path / "cache"
    base_model().save_pretrained(place)

    def load():
        model = type(base_model()).from_pretrained(place).eval()
        model.config._name_or_path = "org/known"
        return model

    return place, load


def test_adapters_are_saved_with_a_name_that_others_can_load(lying_in_a_cache, tmp_path):
    place, base = lying_in_a_cache
    model = get_peft_model(base(), config()).eval()
    assert model.peft_config["default"].base_model_name_or_path == str(place)  # where PEFT finds its files
    model.save_pretrained(tmp_path / "adapter")
    (mean,) = model.export_samples(0, tmp_path / "exported")
    for directory in (tmp_path / "adapter", mean):
        written = json.loads((directory / "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == "org/known"
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "base_model: org/known" in card and "base_model:adapter:org/known" in card and str(place) not in card


def test_an_adapter_that_was_loaded_is_saved_alike(lying_in_a_cache, tmp_path):
    place, base = lying_in_a_cache
    model = get_peft_model(base(), config()).eval()
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.peft_config["default"].base_model_name_or_path == str(place)
    loaded.save_pretrained(tmp_path / "again")
    first, again = ((tmp_path / name / "adapter_config.json").read_text() for name in ("adapter", "again"))
    assert json.loads(again)["base_model_name_or_path"] == json.loads(first)["base_model_name_or_path"] == "org/known"


def test_names_of_other_models_are_left_alone(tmp_path):
    base_model().save_pretrained(tmp_path / "base")
    model = get_peft_model(type(base_model()).from_pretrained(tmp_path / "base"), config())
    model.save_pretrained(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "base")


def test_a_model_without_a_name_gets_none(tmp_path):
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), config(target_modules=["0"], task_type=None))
    assert not hasattr(model.base_model, "name_or_path")
    model.save_pretrained(tmp_path)
    assert "base_model:adapter" not in (tmp_path / "README.md").read_text()
