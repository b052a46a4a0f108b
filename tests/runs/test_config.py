"""Settings: what is filled in, what is refused and how, and that nothing is lost on the way to a file and back."""

import copy
import dataclasses
import json
import re

import pytest

from bayeslora.errors import InputError
from bayeslora.methods import METHODS, Method, Preset
from bayeslora.methods.base import COMMON
from bayeslora.posterior import DecoupledConfig, EnsemblePosterior, InducingConfig
from bayeslora.runs.config import _parse_pairs
from bayeslora.runs.saved_config import differences, flatten, from_dict, saved_run, to_dict, without_trust
from bayeslora.train import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    PredictionConfig,
    RunConfig,
    TrainingConfig,
    resolve,
)

PARTS = {
    "data": DataConfig,
    "loading": ModelConfig,
    "adapter": AdapterConfig,
    "training": TrainingConfig,
    "prediction": PredictionConfig,
}


def run(**changes):
    return RunConfig(**{"model": "m", "task": "t", **changes})


def failure(action):
    with pytest.raises(InputError) as error:
        action()
    message = str(error.value)
    assert "\n" not in message
    return message


# Filling in -----------------------------------------------------------------------------------------------------------

PUBLISHED = {
    "epochs": 10,
    "batch_size": 8,
    "weight_decay": 0.1,
    "schedule": "multistep",
    "milestones": (4, 6),
    "label_smoothing": 0.1,
    "learning_rate": 5e-4,
    "warmup": 0.0,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_a_preset_leaves_nothing_open(method, preset):
    resolved = resolve(run(method=method, preset=preset))
    still_open = [name for name, value in vars(resolved.training).items() if value is None]
    assert still_open == ["micro_batch"]
    assert resolve(resolved) == resolved


@pytest.mark.parametrize("method", [name for name in METHODS if name != "ivon"])
def test_the_paper_preset_is_what_was_published(method):
    training = resolve(run(method=method, preset="paper")).training
    assert {name: getattr(training, name) for name in PUBLISHED} == PUBLISHED
    assert training.rate_multipliers == ({"weights_b": 16.0} if method == "lora-plus" else {})


def test_ivon_has_the_settings_of_its_own_publication():
    published = resolve(run(method="ivon", preset="paper"))
    assert (published.training.learning_rate, published.training.batch_size) == (0.03, 4)
    wanted = {"sample_size": 1e6, "hessian": 1e-3, "damping": 0.0, "beta1": 0.9, "beta2": 0.99999, "radius": 1e-3}
    assert published.adapter.settings == wanted


@pytest.mark.parametrize("changes", [{"method": "ivon", "optimiser": "adamw"}, {"method": "bbb", "optimiser": "ivon"}])
def test_ivon_and_its_optimiser_belong_together(changes):
    message = failure(
        lambda: resolve(run(method=changes["method"], training=TrainingConfig(optimiser=changes["optimiser"])))
    )
    own = "ivon" if changes["method"] == "ivon" else "adamw"
    assert message.startswith(f"optimiser is '{changes['optimiser']}', but") and message.endswith(f"use {own}")


@pytest.mark.parametrize(
    "method, given, message",
    [
        (
            "lora",
            {"snapshots": 4, "members": 5},
            "members must be at least 1 and at most snapshots, or both 0, got 5 of 4",
        ),
        ("laplace", {"snapshots": 4, "members": 2}, "snapshots is 4, but method 'laplace' is not trained itself"),
        ("lora", {"snapshots": -1}, "snapshots is -1; give a whole number of at least 0"),
    ],
)
def test_snapshots_that_cannot_be_are_refused(method, given, message):
    assert failure(lambda: resolve(run(method=method, training=TrainingConfig(**given)))).startswith(message)


def test_a_posterior_is_the_presets_or_another_of_the_method():
    assert resolve(run()).adapter.posterior == "decoupled"
    assert resolve(run(preset="inducing")).adapter.posterior == "inducing"
    free = resolve(run(preset="free"))
    assert free.adapter.settings["components"] == 1 and free.training.members == 4
    mixed = resolve(run(preset="paper", adapter=AdapterConfig(posterior="decoupled")))
    assert mixed.adapter.settings == dataclasses.asdict(DecoupledConfig()) and mixed.training.epochs == 10
    message = failure(lambda: resolve(run(adapter=AdapterConfig(posterior="point"))))
    assert message == "method 'bayesian-lora' has no posterior 'point'; it has decoupled, inducing"


def test_checkpoint_ensembles_of_earlier_versions_are_read():
    now = to_dict(resolve(run(method="checkpoint-ensemble")))
    before = copy.deepcopy(now)
    del before["adapter"]["posterior"], before["training"]["snapshots"], before["training"]["members"]
    before["adapter"]["settings"] = {"members": 3, "snapshots": 4}
    found = saved_run(before)
    assert to_dict(found) == now


def test_runs_that_do_not_name_their_posterior_have_the_former_one():
    before = to_dict(resolve(run(preset="inducing")))
    del before["adapter"]["posterior"]
    assert saved_run(before).adapter.posterior == "inducing"


def test_presets_of_bayesian_lora():
    default, inducing, paper = (resolve(run(preset=preset)) for preset in ("default", "inducing", "paper"))
    assert default.adapter.settings == dataclasses.asdict(DecoupledConfig(components=4, width=0.03))
    assert (default.training.learning_rate, default.training.draws, default.training.aim) == (7e-4, 8, 0)
    assert inducing.training.rate_multipliers == {"points": 20.0, "flow": 0.1, "weights": 0.35}
    assert (inducing.training.kl_scaling, paper.training.kl_scaling) == ("elbo", "paper")
    assert inducing.adapter.settings == dataclasses.asdict(InducingConfig())
    assert paper.adapter.settings == dataclasses.asdict(InducingConfig.preset("paper"))


def test_a_method_of_ones_own_is_filled_in_from_its_preset_and_the_common_settings(monkeypatch):
    preset = Preset({"members": 5}, {"learning_rate": 0.5, "epochs": 7})
    monkeypatch.setitem(METHODS, "mine", Method("mine", "", {"default": preset}, EnsemblePosterior))
    resolved = resolve(run(method="mine"))
    assert resolved.adapter.settings == {"members": 5}
    want = {**COMMON, "learning_rate": 0.5, "epochs": 7, "rate_multipliers": {}}
    assert {name: getattr(resolved.training, name) for name in want} == want


GIVEN = {
    "epochs": 1,
    "batch_size": 5,
    "learning_rate": 0.125,
    "rate_multipliers": {"flow": 3.0, "points": 0.0, "weights": 2.0},
    "weight_decay": 0.0,
    "schedule": "constant",
    "warmup": 0.0,
    "milestones": (),
    "label_smoothing": 0.0,
    "kl_scaling": "elbo",
    "kl_beta": 0.0,
    "kl_warmup": 0.25,
    "optimiser": "adamw",
    "cycles": 2,
    "kl_rate": 0.5,
    "draws": 3,
    "micro_batch": 2,
    "clip": 9.0,
    "eval_every": 3,
    "patience": 0,
    "cache_trunk": True,
}


def test_multipliers_that_are_not_given_stay_the_methods():
    given = TrainingConfig(rate_multipliers={"flow": 3.0})
    inducing = resolve(run(preset="inducing", training=given))
    assert inducing.training.rate_multipliers == {"points": 20.0, "flow": 3.0, "weights": 0.35}
    assert resolve(run(preset="paper", training=given)).training.rate_multipliers == {"flow": 3.0}


@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize("name", GIVEN)
def test_a_given_value_wins_though_it_be_zero(preset, name):
    given = TrainingConfig(**{name: GIVEN[name]})
    resolved = resolve(run(preset=preset, training=given)).training
    assert getattr(resolved, name) == GIVEN[name]
    rest = [f.name for f in dataclasses.fields(TrainingConfig) if f.name != name]
    plain = resolve(run(preset=preset)).training
    assert {n: getattr(resolved, n) for n in rest} == {n: getattr(plain, n) for n in rest}


def test_a_given_setting_of_the_posterior_wins_and_the_others_stay():
    paper = resolve(run(preset="paper")).adapter.settings
    changed = resolve(run(preset="paper", adapter=AdapterConfig(rank=4, settings={"flow_depth": 0}))).adapter
    assert changed.settings == {**paper, "flow_depth": 0} and changed.rank == 4


def test_resolving_changes_nothing_else():
    config = run(seed=3, data=DataConfig(max_train=5), prediction=PredictionConfig(samples=9))
    resolved = resolve(config)
    for name in ("model", "task", "method", "preset", "seed", "data", "loading", "prediction"):
        assert getattr(resolved, name) == getattr(config, name)
    assert config.training == TrainingConfig() and config.adapter == AdapterConfig()


# Refusals -------------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"method": "bayesian-lorra"}, "unknown method 'bayesian-lorra' (did you mean 'bayesian-lora'?); choose lora, "),
    ({"method": "?"}, "unknown method '?'; choose "),
    (
        {"preset": "papr"},
        "method 'bayesian-lora' has no preset 'papr' (did you mean 'paper'?); choose default, paper, inducing, free",
    ),
    (
        {"adapter": AdapterConfig(settings={"flow_dept": 1})},
        "settings of method 'bayesian-lora': posterior 'decoupled' has no setting 'flow_dept'; it has ",
    ),
    (
        {"adapter": AdapterConfig(settings={"flow_depth": -1})},
        "settings of method 'bayesian-lora': flow_depth must be 0 (no flow) or more, got -1",
    ),
    (
        {"adapter": AdapterConfig(settings={"flow_depth": "deep"})},
        "settings of method 'bayesian-lora': flow_depth is 'deep'; give a whole number",
    ),
    (
        {"method": "lora", "adapter": AdapterConfig(settings={"flow_depth": 1})},
        "settings of method 'lora': posterior 'point' has no setting 'flow_depth'; it has none",
    ),
    (
        {"training": TrainingConfig(rate_multipliers={"flwo": 1.0})},
        "rate_multipliers has 'flwo' (did you mean 'flow'?); this method's parameters are flow, mean, points, scale, ",
    ),
    (
        {"method": "lora", "training": TrainingConfig(rate_multipliers={"flow": 1.0})},
        "rate_multipliers has 'flow'; this method's parameters are weights",
    ),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_what_a_method_does_not_know_is_refused(changes, message):
    assert failure(lambda: resolve(run(**changes))).startswith(message)


def test_a_misspelt_setting_of_a_posterior_is_recognised():
    message = failure(lambda: resolve(run(adapter=AdapterConfig(settings={"flow_dept": 1}))))
    assert message.endswith("(did you mean 'flow_depth'?)")


NAN, INF = float("nan"), float("inf")
LEAST = "give a whole number of at least "
POSITIVE, NOT_NEGATIVE = "give a finite number above 0", "give a finite number of at least 0"
SHARE = "give a finite number of at least 0 and below 1"
BAD = [
    (DataConfig, "max_tokens", [1, 0, -5], LEAST + "2"),
    (DataConfig, "max_train", [0, -1], LEAST + "1"),
    (DataConfig, "scoring", ["leter"], "choose text, letter"),
    (ModelConfig, "dtype", ["float64", "int8"], "choose auto, float32, bfloat16, float16"),
    (ModelConfig, "bits", [3, 16], "choose 4, 8"),
    (AdapterConfig, "rank", [0, -8], LEAST + "1"),
    (AdapterConfig, "alpha", [0, -1.0, NAN, INF], POSITIVE),
    (AdapterConfig, "layers", ["last:0", "last:", "last", "first:2", "last:-1", "last:1.5", "", "4"], "give 'all', "),
    (AdapterConfig, "stochastic_layers", ["last:0", "half", "0", "1.5", "nan"], "give 'all', "),
    (PredictionConfig, "draw_layers", ["last:0", "half", "-0.5"], "give 'all', "),
    (TrainingConfig, "epochs", [0, -1], LEAST + "1"),
    (TrainingConfig, "batch_size", [0], LEAST + "1"),
    (TrainingConfig, "micro_batch", [0], LEAST + "1"),
    (TrainingConfig, "draws", [0], LEAST + "1"),
    (TrainingConfig, "eval_every", [0], LEAST + "1"),
    (TrainingConfig, "patience", [-1], LEAST + "0"),
    (TrainingConfig, "learning_rate", [0.0, -1e-3, NAN, INF], POSITIVE),
    (TrainingConfig, "clip", [0.0, -1.0, NAN, INF], POSITIVE),
    (TrainingConfig, "weight_decay", [-0.1, NAN, INF], NOT_NEGATIVE),
    (TrainingConfig, "kl_beta", [-0.1, NAN, INF], NOT_NEGATIVE),
    (TrainingConfig, "warmup", [-0.1, 1.0, NAN], SHARE),
    (TrainingConfig, "label_smoothing", [-0.1, 1.0, NAN], SHARE),
    (TrainingConfig, "kl_warmup", [-0.1, 1.0, NAN], SHARE),
    (TrainingConfig, "schedule", ["cosin", "Linear"], "choose linear, cosine, cyclic, multistep, constant"),
    (TrainingConfig, "kl_scaling", ["none"], "choose elbo, paper, blob"),
    (TrainingConfig, "optimiser", ["adam"], "choose adamw, split"),
    (TrainingConfig, "kl_rate", [0.0, -1e-3, NAN, INF], POSITIVE),
    (PredictionConfig, "samples", [-1, 1025], "give 0 for the posterior mean, or a number of draws up to 1024"),
    (PredictionConfig, "batch_tokens", [0], LEAST + "1"),
    (RunConfig, "seed", [-1, NAN], LEAST + "0"),
    (RunConfig, "seed", [2**64], "give a number below 2^64"),
]


@pytest.mark.parametrize("kind, name, value, advice", [(k, n, v, a) for k, n, values, a in BAD for v in values])
def test_values_out_of_range_are_refused_with_name_value_and_advice(kind, name, value, advice):
    required = {"model": "m", "task": "t"} if kind is RunConfig else {}
    message = failure(lambda: kind(**required, **{name: value}))
    assert message.startswith(f"{name} is {value}") or message.startswith(f"{name} is {value!r}")
    assert advice in message


def test_other_refusals():
    assert failure(lambda: AdapterConfig(targets=())) == "targets is empty; name at least one module, such as q_proj"
    assert failure(lambda: TrainingConfig(milestones=(4, 0))) == "milestones is 0; give a whole number of at least 1"
    for value in (-1.0, "fast", None, NAN):
        message = failure(lambda value=value: TrainingConfig(rate_multipliers={"flow": value}))
        assert message == f"rate_multipliers flow is {value!r}; give a finite number of at least 0"
    assert "(did you mean 'cosine'?)" in failure(lambda: TrainingConfig(schedule="cosin"))


def test_every_choice_of_a_setting_is_allowed():
    for name, kind, values in (
        ("scoring", DataConfig, ["text", "letter"]),
        ("bits", ModelConfig, [None, 4, 8]),
        ("schedule", TrainingConfig, [None, "linear", "cosine", "multistep", "constant"]),
        ("kl_scaling", TrainingConfig, [None, "elbo", "paper"]),
    ):
        assert [getattr(kind(**{name: value}), name) for value in values] == values


def test_layers_with_a_distribution_need_a_method_that_has_one():
    partial = AdapterConfig(stochastic_layers="last:2")
    assert resolve(run(adapter=partial)).adapter.stochastic_layers == "last:2"
    for method in ("lora", "tfb", "pvera"):
        message = failure(lambda method=method: resolve(run(method=method, adapter=partial)))
        assert message == f"stochastic_layers is 'last:2', but method '{method}' covers all layers alike; use 'all'"


# Files ----------------------------------------------------------------------------------------------------------------


def changed(kind):
    """A part with every field different from its default."""
    other = {
        "targets": ("a", "b"),
        "layers": "last:2",
        "stochastic_layers": "last:1",
        "posterior": "point",
        "draw_layers": "0.5",
        "nli": "org/nli",
        "calibrate": "none",
        "unfamiliar_by": "entropy",
        "unfamiliar_from": 0.95,
        "settings": {"flow_depth": 0, "zero_start": None},
        "scoring": "letter",
        "columns": {"question": "query"},
        "dataset_config": "main",
        "dataset_splits": {"train": "train_sft"},
        "dtype": "bfloat16",
        "bits": 4,
        "revision": "main",
        **{name: value for name, value in GIVEN.items() if name != "rate_multipliers"},
        "rate_multipliers": {"flow": 0.5, "points": 2.0},
    }

    def value(field):
        if field.name in other:
            return other[field.name]
        return (not field.default) if isinstance(field.default, bool) else (field.default or 1) + 1

    return kind(**{field.name: value(field) for field in dataclasses.fields(kind)})


def all_changed():
    return run(method="lora", preset="paper", seed=4, **{name: changed(kind) for name, kind in PARTS.items()})


@pytest.mark.parametrize("make", [run, all_changed, lambda: resolve(run()), lambda: resolve(run(preset="paper"))])
def test_a_run_comes_back_from_json(make):
    config = make()
    text = json.dumps(to_dict(config), allow_nan=False)
    assert from_dict(json.loads(text)) == config
    assert to_dict(from_dict(json.loads(text))) == to_dict(config)


def test_every_field_is_in_the_file():
    values = to_dict(all_changed())
    plain = to_dict(run())
    assert values.keys() == {field.name for field in dataclasses.fields(RunConfig)}
    for name, kind in PARTS.items():
        assert values[name].keys() == {field.name for field in dataclasses.fields(kind)}
        same = [key for key, value in values[name].items() if value == plain[name][key]]
        assert same == [], f"the test changes nothing in {same}"


def test_what_is_missing_in_a_file_has_its_default():
    assert from_dict({"model": "m", "task": "t", "training": {"epochs": 3}}) == run(training=TrainingConfig(epochs=3))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"modle": "m"}, "unknown setting 'modle' (did you mean 'model'?); choose model, task, method, "),
        ({"training": {"epoch": 3}}, "unknown setting 'epoch' (did you mean 'epochs'?); choose epochs, batch_size, "),
        ({"training": {"epochs": 0}}, "epochs is 0; give a whole number of at least 1"),
        ({"training": {"schedule": "cosin"}}, "schedule is 'cosin' (did you mean 'cosine'?); choose "),
        ({"data": None}, "settings of DataConfig are None; give a JSON object"),
        ({"data": ["x"]}, "settings of DataConfig are ['x']; give a JSON object"),
        ({"epochs": 3}, "unknown setting 'epochs'"),
    ],
)
def test_files_that_say_something_unknown_are_refused(values, message):
    assert failure(lambda: from_dict({"model": "m", "task": "t", **values})).startswith(message)


@pytest.mark.parametrize("name", ["model", "task"])
def test_files_that_lack_what_has_no_default_are_refused(name):
    values = {key: "x" for key in ("model", "task") if key != name}
    assert failure(lambda: from_dict(values)) == f"setting {name!r} is missing; give it"


def test_names_of_settings_are_unique_so_that_they_can_be_flat():
    names = [field.name for kind in PARTS.values() for field in dataclasses.fields(kind)]
    own = [field.name for field in dataclasses.fields(RunConfig) if field.name not in PARTS]
    assert len(names) + len(own) == len(set(names) | set(own))
    flat = flatten(to_dict(all_changed()))
    assert flat.keys() == {*names, *own}
    assert flat["settings"] == {"flow_depth": 0, "zero_start": None} and flat["epochs"] == 1 and flat["seed"] == 4


def test_differences_name_what_differs():
    mine, other = to_dict(run(seed=1)), to_dict(run(training=TrainingConfig(epochs=3)))
    assert differences(mine, mine) == []
    assert differences(mine, other) == ["seed is 0 there and 1 here", "epochs is 3 there and not set here"]
    assert differences(mine, {**mine, "more": 1}) == ["more is 1 there and not set here"]
    nested = to_dict(run(adapter=AdapterConfig(settings={"flow_depth": 0})))
    assert differences(to_dict(run()), nested) == ["settings is {'flow_depth': 0} there and {} here"]


# Command line ---------------------------------------------------------------------------------------------------------


def test_pairs_are_json_or_else_text():
    words = ["a=1", "b=0.5", "c=true", "d=null", "e=text", "f=", "g=x=y", 'h="1"']
    assert _parse_pairs(words) == {
        "a": 1,
        "b": 0.5,
        "c": True,
        "d": None,
        "e": "text",
        "f": "",
        "g": "x=y",
        "h": "1",
    }
    with pytest.raises(ValueError, match=re.escape("'flow_depth' is not NAME=VALUE")):
        _parse_pairs(["flow_depth"])


def test_runs_of_versions_that_did_not_calibrate_say_so():
    values = to_dict(resolve(run()))
    assert saved_run(values).prediction.calibrate == "validation"
    del values["prediction"]["calibrate"]
    assert saved_run(values).prediction.calibrate == "none"


def test_no_file_decides_whether_code_is_run():
    """Whether an earlier version has saved it at the top or among the settings of loading."""
    told = {"model": "m", "trust_remote_code": True, "loading": {"bits": 4, "trust_remote_code": True}}
    assert without_trust(told) == {"model": "m", "loading": {"bits": 4}}
    assert without_trust({"model": "m"}) == {"model": "m"} and "trust_remote_code" in told


def test_a_run_by_the_names_of_its_settings():
    made = RunConfig.of("m", "t", epochs=1, rank=4, samples=2, seed=7, columns={"question": "q"}, targets=["a"])
    assert (made.training.epochs, made.adapter.rank, made.prediction.samples, made.seed) == (1, 4, 2, 7)
    assert made.adapter.targets == ("a",) and made.data.columns == {"question": "q"}
    assert "unknown setting 'epoch' (did you mean 'epochs'?)" in failure(lambda: RunConfig.of("m", "t", epoch=1))
    assert "rank is 'x'; give a whole number" in failure(lambda: RunConfig.of("m", "t", rank="x"))
