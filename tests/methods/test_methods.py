"""What every method must offer: presets that can be used, and a line that says what it is."""

import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from adapter.cases import adapted, base_model, foreign_model
from bayeslora.errors import InputError
from bayeslora.method_names import METHOD_NAMES, check_method_names
from bayeslora.methods import METHODS, find_method, find_preset, registry
from bayeslora.methods.base import COMMON, PAPER, PostHocInputs, QuestionPostHocInputs
from bayeslora.posterior import InducingConfig
from bayeslora.posterior.registry import POSTERIORS, make_settings
from bayeslora.progress import Silent
from bayeslora.train import AdapterConfig, RunConfig, TrainingConfig, resolve
from bayeslora.train.optimise import parameter_groups, parameter_kinds

ALL = pytest.mark.parametrize("name", METHODS)
PRESETS = pytest.mark.parametrize("preset", ["default", "paper"])
TRAINING = {field.name for field in fields(TrainingConfig)}


@ALL
def test_a_method_is_found_under_its_own_name(name):
    method = find_method(name)
    assert method is METHODS[name] and method.name == name
    assert (method.posterior_name in POSTERIORS) == (method.foreign() is None) == (method.posterior is not None)
    assert {"default", "paper"} <= method.presets.keys()
    assert method.description and "\n" not in method.description and not method.description.endswith(".")


def test_all_names_are_known_without_the_methods(monkeypatch):
    assert tuple(registry.ALL) == METHOD_NAMES
    assert all(method.name == name for name, method in registry.ALL.items())
    check_method_names(["jitter"])  # those that are imported tell it themselves: there may be more
    monkeypatch.delitem(sys.modules, "bayeslora.methods")
    check_method_names(METHOD_NAMES)
    with pytest.raises(InputError, match=r"^unknown method 'jitter'; choose lora, "):
        check_method_names(["lora", "jitter"])


def distribution_of(method, preset):
    """The class of the distribution of a preset."""
    return method.distribution(preset.posterior and preset.posterior.name)


@ALL
@PRESETS
def test_presets_name_settings_that_exist(name, preset):
    method = METHODS[name]
    found = find_preset(method, preset)
    assert found is method.presets[preset]
    assert set(found.training) <= TRAINING
    make_settings(name, distribution_of(method, found).config_class, found.settings)  # refuses what it does not know


def test_common_and_published_settings_exist():
    assert set(COMMON) <= TRAINING and set(PAPER) <= TRAINING
    assert "learning_rate" not in COMMON  # each method has its own


@ALL
@PRESETS
def test_presets_make_posteriors_that_are_trained_as_they_say(name, preset):
    resolved = resolve(RunConfig(model="m", task="t", method=name, preset=preset))
    method, settings = METHODS[name], dict(resolved.adapter.settings)
    if (foreign := method.foreign()) is None:
        model = adapted(posterior=resolved.adapter.posterior, settings=settings, r=8)
    else:
        model = foreign_model(foreign, settings)
    kinds = set(parameter_kinds(model).values())
    hints = distribution_of(method, find_preset(method, preset)).hints
    assert kinds <= hints.all_kinds
    assert set(resolved.training.rate_multipliers) <= hints.all_kinds
    assert resolved.training.learning_rate > 0


def test_the_baseline_and_the_reference_method():
    assert METHODS["lora"].posterior_name == "point" and METHODS["bayesian-lora"].posterior_name == "decoupled"
    assert METHODS["lora"].posterior.spread == "nothing"
    paper = find_preset(METHODS["bayesian-lora"], "paper")
    assert InducingConfig(**paper.settings) == InducingConfig.preset("paper")
    assert InducingConfig(**find_preset(METHODS["bayesian-lora"], "inducing").settings) == InducingConfig()
    default = resolve(RunConfig(model="m", task="t"))
    assert (default.adapter.posterior, default.adapter.settings["components"]) == ("decoupled", 4)
    assert default.training.draws % 4 == 0  # every component has its part of a batch


class Told(Silent):
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


@pytest.mark.parametrize(
    "questions, fitted, kept, said",
    [
        (1, 0.05, 1.0, "it takes at least 10 validation questions, and the task has 1;"),
        (9, 2.0, 1.0, "it takes at least 10 validation questions, and the task has 9;"),
        (10, 2.0, 2.0, None),
        (10, 0.05, 1.0, "or all of them are right; this run has 1"),
        (10, 20.0, 20.0, "no better than guesses, or all of them are right; this run has 20"),
        (None, 0.05, 1.0, "or all of them are right; this run has 1"),  # running text
    ],
)
def test_a_temperature_that_the_data_do_not_determine_makes_no_model_certain(questions, fitted, kept, said):
    told = Told()
    inputs = {
        "posterior": SimpleNamespace(start_from=lambda lora: None),
        "loras": [None],
        "seed": 0,
        "report": told,
        "fit_temperature": lambda advance: fitted,
    }
    if questions is None:
        found = METHODS["temperature"].fit_post_hoc(PostHocInputs(**inputs))
    else:
        validation = SimpleNamespace(items=[None] * questions)
        found = METHODS["temperature"].fit_post_hoc(
            QuestionPostHocInputs(**inputs, predictor=None, train=None, validation=validation)
        )
    assert found.found == {"temperature": kept} and found.calibration.temperature == kept
    assert told.lines == [] if said is None else said in told.lines[0] and len(told.lines) == 1


def test_unknown_names_are_refused_with_the_closest_one():
    with pytest.raises(InputError, match=r"^unknown method 'Lora' \(did you mean 'lora'\?\); choose lora, "):
        find_method("Lora")
    with pytest.raises(
        InputError, match=r"^method 'lora' has no preset 'defalt' \(did you mean 'default'\?\); choose "
    ):
        find_preset(METHODS["lora"], "defalt")
    with pytest.raises(InputError, match=r"^method 'lora' has no preset 'x'; choose default, paper$"):
        find_preset(METHODS["lora"], "x")


@pytest.mark.parametrize(
    "peft, lacking",
    [("0.18.1", {"monteclora", "pvera"}), ("0.19.1", {"monteclora"}), ("0.20.1.dev0", set()), ("1.0.0", set())],
)
def test_what_the_installed_peft_lacks_is_not_offered(peft, lacking, monkeypatch):
    offered = registry.offered(peft)
    assert registry.ALL.keys() - offered.keys() == lacking
    assert list(offered) == [name for name in registry.ALL if name not in lacking]
    monkeypatch.setattr(registry, "METHODS", offered)
    monkeypatch.setattr(registry, "version", lambda package: peft)
    for name in registry.ALL.keys() - lacking:
        assert find_method(name) is registry.ALL[name]
    for name in lacking:
        since = {"monteclora": "0.20", "pvera": "0.19"}[name]
        with pytest.raises(
            InputError, match=rf"^method '{name}' .* from PEFT {since} on, and {peft} is installed; upd"
        ):
            resolve(RunConfig(model="m", task="t", method=name))


def test_lora_plus_has_the_rates_of_pefts_optimiser():
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer

    resolved = resolve(RunConfig(model="m", task="t", method="lora-plus", adapter=AdapterConfig(targets=("q_proj",))))
    rate, decay = resolved.training.learning_rate, 0.01
    ours = parameter_groups(adapted(posterior="point"), rate, decay, resolved.training.rate_multipliers)
    lora = get_peft_model(base_model(), LoraConfig(target_modules=["q_proj"]))
    theirs = create_loraplus_optimizer(
        lora, torch.optim.AdamW, lr=rate, loraplus_lr_ratio=16, loraplus_weight_decay=decay
    )
    names = {id(parameter): name for name, parameter in lora.named_parameters()}
    expected = {
        names[id(p)].split(".lora_")[1][0]: group["lr"] for group in theirs.param_groups for p in group["params"]
    }
    assert {group["kind"][-1].upper(): pytest.approx(group["lr"]) for group in ours} == expected
    assert {group["weight_decay"] for group in ours} == {decay}
