"""Several adapters, targets of all kinds, and what is refused."""

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model

from adapter.cases import MODELS, adapted, base_model, config, generator, logits, tokens
from bayeslora import BayesLoraConfig, find_holder
from bayeslora.adapter.config import LORA_ONLY
from bayeslora.adapter.layer import BayesLoraLinear
from bayeslora.posterior.registry import POSTERIORS

ALL = pytest.mark.parametrize("architecture", MODELS)


def layer_names(model, adapter="default"):
    return [layer.name for layer in find_holder(model).posterior(adapter).layers]


# Registration -----------------------------------------------------------------------------------------------------


def test_the_method_is_a_full_member_of_the_enumeration():
    import json
    import pickle

    member = PeftType("BAYESLORA")
    assert member is PeftType.BAYESLORA is PeftType["BAYESLORA"]
    assert member in list(PeftType)
    assert member == "BAYESLORA" and hash(member) == hash("BAYESLORA")
    assert json.dumps(member) == '"BAYESLORA"'
    assert pickle.loads(pickle.dumps(member)) is member
    assert copy.deepcopy(member) is member


def run_python(script):
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_posterior_is_documented():
    assert all(f"``{name}``" in BayesLoraConfig.__doc__ for name in POSTERIORS)


def test_importing_is_light():
    run_python("import bayeslora, sys; assert 'transformers' not in sys.modules and 'torch' not in sys.modules")


@pytest.mark.system
def test_importing_in_any_order_registers_it():
    """In processes of their own, all of which start with what takes long and has no say in it."""
    orders = [
        "import bayeslora, peft; assert peft.PeftType('BAYESLORA')",
        "import peft, bayeslora; assert peft.PeftType('BAYESLORA')",
        "import bayeslora; bayeslora.BayesLoraConfig(); import peft; assert peft.PeftType('BAYESLORA')",
        "import bayeslora; from peft import get_peft_model; import importlib.resources as r; r.files('peft')",
    ]
    run_python(
        "import os, sys, traceback, accelerate, torch._dynamo, transformers.modeling_utils\n"
        "assert not {'peft', 'bayeslora'} & set(sys.modules)\n"
        f"for order in {orders}:\n"
        "    if os.fork() == 0:\n"
        "        try:\n"
        "            exec(order)\n"
        "        except BaseException:\n"
        "            print(order, traceback.format_exc(), file=sys.stderr, flush=True)\n"
        "            os._exit(1)\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0, order\n"
    )


# Targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"target_modules": ["q_proj"]}, 2),
        ({"target_modules": r".*\.(q|v)_proj"}, 4),
        ({"target_modules": "all-linear"}, 14),
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, 12),
        ({"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]}, 2),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0}, 1),
        ({"target_modules": None}, 8),
    ],
)
def test_targets(settings, expected):
    model = adapted(**settings)
    assert len(layer_names(model)) == expected
    assert (logits(model) - logits(base_model())).abs().max() > 0


@ALL
def test_default_targets_are_known_for_every_architecture(architecture):
    model = get_peft_model(base_model(architecture), BayesLoraConfig(task_type="CAUSAL_LM"))
    assert layer_names(model)


@ALL
def test_all_linear(architecture):
    """Mixture of experts included: what is linear is adapted, expert tensors are left alone."""
    model = adapted(architecture, target_modules="all-linear")
    model.train()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None for p in find_holder(model).parameters())


def test_rank_and_alpha_patterns_and_rslora():
    model = adapted(r=4, lora_alpha=8, rank_pattern={"k_proj": 2}, alpha_pattern={"lm_head": 3}, use_rslora=True)
    layers = {m.name: m for m in model.modules() if isinstance(m, BayesLoraLinear)}
    assert layers["model.layers.0.self_attn.q_proj"].scaling["default"] == pytest.approx(8 / 4**0.5)
    assert layers["model.layers.0.self_attn.k_proj"].scaling["default"] == pytest.approx(8 / 2**0.5)
    assert layers["lm_head"].scaling["default"] == pytest.approx(3 / 4**0.5)
    factors = find_holder(model).posterior("default").draw()
    assert factors["model.layers.1.self_attn.k_proj"].A.shape[-2] == 2
    assert factors["lm_head"].A.shape[-2] == 4


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"r": 0}, "rank must be an integer of at least 1, got r=0"),
        ({"r": True}, "rank must be an integer of at least 1, got r=True"),
        ({"lora_alpha": "x"}, "lora_alpha must be a finite number, got lora_alpha='x'"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "lora_alpha must be a finite number, got q_proj=nan"),
        ({"rank_pattern": {"q_proj": 1.5}}, "got q_proj=1.5"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters=.* is not supported"),
        ({"posterior": "inducting"}, "unknown posterior 'inducting'.*did you mean 'inducing'"),
        ({"settings": {"flow": 1}}, "has no setting 'flow'"),
        ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "layers_to_transform cannot be used"),
        ({"layers_pattern": "layers"}, "layers_pattern needs layers_to_transform"),
        ({"layers_pattern": "(a+)+", "layers_to_transform": [0]}, r"layers_pattern has '\(a\+\)\+', which is no name"),
        ({"modules_to_save": ["(a|a)*"]}, "modules_to_save has .*, which is no name of a module"),
        ({"bias": "all"}, "bias='all' is not supported: .* leave it at 'none'"),
        ({"lora_dropout": 1.0}, "lora_dropout must be at least 0 and below 1, got 1.0"),
        ({"lora_dropout": -0.1}, "got -0.1"),
        ({"lora_dropout": "a lot"}, "got 'a lot'"),
        (
            {"use_dora": True},
            "use_dora=True is not supported: DoRA divides .* leave it at False, or use PEFT's LoraConfig",
        ),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported: .* leave it at True"),
        ({"init_lora_weights": False}, "init_lora_weights=False is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"layer_replication": [(0, 2)]}, r"layer_replication=\[\(0, 2\)\] is not supported"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'; give a list, each a text"),
        ({"target_modules": [3]}, r"target_modules is \[3\]; give a list, each a text"),
        ({"layers_to_transform": "1"}, "layers_to_transform is '1'; give a list, each a whole number"),
        ({"rank_pattern": None}, "rank_pattern is None; give a dictionary"),
        ({"settings": "x"}, "settings is 'x'; give a dictionary"),
        ({"posterior": None}, "posterior is None; give a text"),
        ({"seed": "x"}, "seed is 'x'; give a whole number"),
        ({"posterior_scale": "1"}, "posterior_scale is '1'; give a number"),
        ({"lora_dropout": 0.1, "posterior": "dropout"}, "would drop inputs twice; set p in its settings"),
    ],
)
def test_bad_configurations_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BayesLoraConfig(**settings)


def test_settings_that_were_changed_are_looked_at_again():
    changed = config()
    changed.bias = "lora_only"
    with pytest.raises(ValueError, match="bias='lora_only' is not supported"):
        get_peft_model(base_model(), changed)
    changed = config()
    changed.use_dora = True
    with pytest.raises(ValueError, match="use_dora=True is not supported"):
        get_peft_model(base_model(), changed)


def test_what_scripts_for_lora_say_by_default_is_taken_and_not_saved(tmp_path):
    given = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)
    names = ("r", "target_modules", "lora_dropout", "bias", "use_rslora", "init_weights", *LORA_ONLY)
    made = BayesLoraConfig(**{name: getattr(given, name) for name in names if hasattr(given, name)})
    assert made.lora_dropout == 0.1 and not made.use_dora and not LORA_ONLY.keys() & made.to_dict().keys()
    assert replace(made, r=2).r == 2 and copy.deepcopy(made) == made
    made.save_pretrained(tmp_path)
    assert PeftConfig.from_pretrained(tmp_path) == made
    for name, (default, _) in LORA_ONLY.items():
        assert getattr(LoraConfig(), name) == default


def test_the_settings_of_a_lora_become_ours(tmp_path):
    told = {
        "r": 4, "lora_alpha": 12, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"], "use_rslora": True,
        "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}, "layers_to_transform": [1],
        "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM", "revision": "main",
    }  # fmt: skip
    made = BayesLoraConfig.from_lora(LoraConfig(**told), posterior="inducing", settings={"flow_depth": 0}, seed=3)
    assert made == BayesLoraConfig(**told, posterior="inducing", settings={"flow_depth": 0}, seed=3)
    assert BayesLoraConfig.from_lora(LoraConfig(**told), r=2) == BayesLoraConfig(**{**told, "r": 2})
    get_peft_model(base_model(), LoraConfig(**told)).save_pretrained(tmp_path)
    loaded = PeftConfig.from_pretrained(tmp_path)
    assert loaded.inference_mode
    again = BayesLoraConfig.from_lora(loaded)
    assert not again.inference_mode and again.peft_type == "BAYESLORA" and again.rank_pattern == {"v_proj": 2}
    assert all(p.requires_grad for p in find_holder(get_peft_model(base_model(), again)).parameters())


@pytest.mark.parametrize(
    "config, message",
    [
        (
            LoraConfig(use_qalora=True, ensure_weight_tying=True),
            "not supported: use_qalora=True, ensure_weight_tying=True; leave them",
        ),
        (LoraConfig(use_dora=True), "use_dora=True is not supported: DoRA divides"),
        (LoraConfig(init_lora_weights="gaussian"), "init_lora_weights='gaussian' is not supported"),
        (LoraConfig(bias="all"), "bias='all' is not supported"),
        (AdaLoraConfig(total_step=10), "expected a peft.LoraConfig, got AdaLoraConfig"),
        ({"r": 8}, "expected a peft.LoraConfig, got dict"),
    ],
)
def test_settings_of_a_lora_that_we_have_not_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        BayesLoraConfig.from_lora(config)


@pytest.mark.parametrize("settings", [{"r": 20_000}, {"rank_pattern": {"lm_head": 20_000}}])
def test_ranks_that_no_layer_has_use_for_are_refused(settings):
    with pytest.raises(ValueError, match=r"rank 20000 is more than .* has use for \(32 inputs, \d+ outputs\): set r"):
        adapted(**settings)


@pytest.mark.parametrize(
    "architecture, target, message",
    [
        ("qwen3_moe", ["experts"], r"target module model.layers.0.mlp.experts \(Qwen3MoeExperts\) is not supported"),
        ("llama", ["embed_tokens"], r"target module model.embed_tokens \(Embedding\) is not supported"),
        ("llama", ["nothing"], "not found in the base model"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(architecture, target, message):
    with pytest.raises(ValueError, match=message):
        adapted(architecture, target_modules=target)


def test_a_model_with_an_adapter_of_another_method_is_told_what_to_do():
    base = get_peft_model(base_model(), LoraConfig(target_modules=["q_proj"])).get_base_model()
    with pytest.raises(ValueError, match=r"q_proj has an adapter of another method already; call merge_and_unload\(\)"):
        get_peft_model(base, config(target_modules=["q_proj"]))


def test_a_second_adapter_of_the_same_name_replaces_the_first(tmp_path):
    """As when a cell of a notebook is run again with other targets: PEFT warns, and makes it on the model that was adapted."""
    base = base_model()
    get_peft_model(base, config(target_modules=["q_proj", "up_proj"]))
    with pytest.warns(UserWarning, match="modify a model with PEFT for a second time"):
        model = get_peft_model(base, config(target_modules=["q_proj", "v_proj"])).eval()
    assert {name.rpartition(".")[2] for name in layer_names(model)} == {"q_proj", "v_proj"}
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(model), logits(PeftModel.from_pretrained(base_model(), tmp_path).eval()))


FAILING = [
    {"target_modules": ["q_proj", "v_proj"], "stochastic_layers": "last:99"},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {
        "target_modules": ["q_proj", "v_proj"],
        "settings": {"inducing_rows": 2, "share_inducing": True, "whitened": False},
    },
]


REASONS = "last:99|is not supported|share_inducing"


@pytest.mark.parametrize("failing", FAILING)
def test_an_adapter_that_cannot_be_made_leaves_the_model_as_it_was(failing):
    base = base_model()
    modules, before = [type(module) for module in base.modules()], logits(base)
    with pytest.raises(ValueError, match=REASONS):
        get_peft_model(base, config(**failing))
    assert [type(module) for module in base.modules()] == modules and not base._forward_pre_hooks
    assert torch.equal(logits(base), before)
    model = get_peft_model(base, config(target_modules=["k_proj"]))
    assert {name.rpartition(".")[2] for name in find_holder(model).layer_names} == {"k_proj"}


@pytest.mark.parametrize("failing", FAILING)
def test_a_second_adapter_that_cannot_be_made_leaves_the_first(failing):
    model = adapted(target_modules=["q_proj", "k_proj"])
    modules, before = [type(module) for module in model.modules()], logits(model)
    with pytest.raises(ValueError, match=REASONS):
        model.add_adapter("other", config(**failing))
    assert [type(module) for module in model.modules()] == modules and list(model.peft_config) == ["default"]
    assert torch.equal(logits(model), before)
    model.add_adapter("other", config(target_modules=["k_proj"], seed=3))
    model.set_adapter("other")
    assert {name.rpartition(".")[2] for name in find_holder(model).layer_names} == {"k_proj"}


def test_fan_in_fan_out_on_an_ordinary_layer_is_noticed():
    with pytest.warns(UserWarning, match="fan_in_fan_out is set but .* is a torch.nn.Linear"):
        get_peft_model(base_model(), config(fan_in_fan_out=True))


# Several adapters -------------------------------------------------------------------------------------------------


@ALL
def test_adding_switching_and_deleting(architecture):
    model = adapted(architecture)
    first = logits(model)
    model.add_adapter("other", config(architecture, posterior="point", seed=3))
    assert torch.equal(first, logits(model))
    assert [p.requires_grad for p in find_holder(model).posterior("other").parameters()] == [
        False,
        False,
    ] * 3 or not any(p.requires_grad for p in find_holder(model).posterior("other").parameters())
    model.set_adapter("other")
    second = logits(model)
    assert not torch.equal(first, second)
    assert all(p.requires_grad for p in find_holder(model).posterior("other").parameters())
    assert not any(p.requires_grad for p in find_holder(model).posterior("default").parameters())
    model.set_adapter("default")
    assert torch.equal(first, logits(model))
    model.delete_adapter("default")
    assert torch.equal(second, logits(model))
    assert "default" not in find_holder(model).bayeslora_posterior
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(base_model(architecture)))
    assert torch.equal(second, logits(model))


def test_adapters_of_the_same_settings_start_apart():
    """As LoRA's do, which start from torch's global random numbers."""
    model = adapted()
    model.add_adapter("other", config())
    alone = adapted()
    answers = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        answers[name] = logits(model)
    assert torch.equal(answers["default"], logits(alone)), "the first starts from its seed"
    assert (answers["default"] - answers["other"]).abs().max() > 1e-3
    again = adapted()
    again.add_adapter("another name", config())
    again.set_adapter("another name")
    assert torch.equal(answers["other"], logits(again))


def test_an_adapter_that_is_added_in_evaluation_is_in_evaluation():
    """Where a Laplace approximation draws, which it does not do in training."""
    model = adapted(target_modules=["q_proj"])
    model.add_adapter("other", config(target_modules=["q_proj"], posterior="laplace"))
    model.set_adapter("other")
    with model.draws(2):
        first, second = logits(model, tokens(batch=1).repeat(2, 1))
    assert not torch.equal(first, second)


def test_an_adapter_that_takes_the_place_of_one_that_was_deleted_starts_apart():
    model = adapted(posterior="point", init_weights=True)
    model.add_adapter("second", config(posterior="point", init_weights=True))
    model.delete_adapter("default")
    model.add_adapter("third", config(posterior="point", init_weights=True))
    holder = find_holder(model)
    second, third = (dict(holder.posterior(name).named_parameters()) for name in ("second", "third"))
    assert all(not torch.equal(second[name], third[name]) for name in second if name.startswith("A_"))


def test_adapters_may_target_different_layers():
    model = adapted(target_modules=["q_proj"])
    model.add_adapter("head", config(target_modules=["lm_head"], seed=2))
    assert len(layer_names(model)) == 2
    assert layer_names(model, "head") == ["lm_head"]
    alone = logits(model)
    model.base_model.set_adapter(["default", "head"])
    both = logits(model)
    model.set_adapter("head")
    assert not torch.equal(alone, both)
    assert not torch.equal(both, logits(model))


def test_after_deleting_the_active_adapter_all_layers_use_the_same_other_one():
    model = adapted(target_modules=["k_proj", "q_proj"])
    model.add_adapter("one", config(target_modules=["k_proj"], seed=2))
    model.add_adapter("two", config(target_modules=["q_proj"], seed=3))
    model.set_adapter("one")
    expected = logits(model)
    model.set_adapter("default")
    model.delete_adapter("default")
    assert model.active_adapters == ["one"] and torch.equal(logits(model), expected)
    assert model.get_model_status().active_adapters == ["one"]
    model.delete_adapter("two")
    assert torch.equal(logits(model), expected)


def test_transformers_chooses_the_same_other_one_in_all_layers_too():
    model = base_model()
    for name, targets in {"all": ["k_proj", "q_proj"], "one": ["k_proj"], "two": ["q_proj"]}.items():
        model.add_adapter(config(target_modules=targets), name)
    model.eval().set_adapter("one")
    expected = logits(model)
    model.set_adapter("all")
    model.delete_adapter("all")
    assert torch.equal(logits(model), expected)


def test_an_adapter_that_is_added_while_adapters_are_disabled_is_disabled_too():
    model = adapted(target_modules=["q_proj"])
    with model.disable_adapter():
        model.add_adapter("other", config(target_modules=["k_proj"], seed=2))
        model.set_adapter("other")
        assert torch.equal(logits(model), logits(base_model()))
    assert not torch.equal(logits(model), logits(base_model()))


def test_base_model_is_frozen_and_only_the_posterior_trains():
    model = adapted()
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in model.named_parameters() if "weight_posterior" in name}
    count, total = model.get_nb_trainable_parameters()
    assert count == find_holder(model).posterior("default").parameter_count()
    assert total == count + sum(p.numel() for p in base_model().parameters())


def test_the_status_is_regular():
    model = adapted()
    status = model.get_model_status()
    assert status.enabled is True
    assert status.active_adapters == ["default"]
    assert status.available_adapters == ["default"]
    assert status.requires_grad == {"default": True}
    assert status.merged_adapters == []


@ALL
def test_mixed_batches(architecture):
    model = adapted(architecture)
    model.add_adapter("other", config(architecture, seed=3))
    ids = tokens()
    rows = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        rows[name] = logits(model, ids)
    rows["__base__"] = logits(base_model(architecture), ids)
    names = ["other", "__base__", "default", "other"]
    mixed = logits(model, ids, adapter_names=names)
    for k, name in enumerate(names):
        torch.testing.assert_close(mixed[k], rows[name][k], atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"non-existing adapter.*wrong"):
        logits(model, ids, adapter_names=["wrong"] * 4)
    for wrong in (names[:3], [*names, "other"]):
        with pytest.raises(ValueError, match="Length of `adapter_names` should be the same as the number of inputs"):
            logits(model, ids, adapter_names=wrong)
    model.train()
    with pytest.raises(ValueError, match="in training mode"):
        logits(model, ids, adapter_names=names)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])  # whose heads are their own, and the embedding's
def test_defaults_leave_heads_to_what_trains_them_in_full(architecture):
    model = adapted(architecture, target_modules=None, modules_to_save=["lm_head"])
    assert {name.rpartition(".")[2] for name in layer_names(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    tokens_too = adapted(architecture, target_modules=None, trainable_token_indices=[1, 2])
    assert "lm_head" not in layer_names(tokens_too)
    before = logits(tokens_too)
    torch.testing.assert_close(logits(tokens_too.merge_and_unload()), before, atol=3e-5, rtol=1e-4)


def test_an_adapter_without_tokens_beside_one_with_them():
    model = adapted("qwen3", target_modules=["q_proj"], trainable_token_indices=[0, 1])
    model.add_adapter("plain", config("qwen3", target_modules=["q_proj"]))
    assert set(model.get_input_embeddings().token_adapter.trainable_tokens_delta) == {"default"}
    model.set_adapter("plain")
    assert logits(model).isfinite().all()


def test_custom_models_are_adapted_too():
    class Net(torch.nn.Sequential):
        pass

    torch.manual_seed(0)
    net = Net(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    x = torch.randn(4, 6)
    before = net(x)
    model = get_peft_model(net, BayesLoraConfig(posterior="inducing", target_modules=["0", "2"], r=2)).eval()
    torch.testing.assert_close(model(x), before)
    with model.draws(2, generator()):
        assert not torch.allclose(model(x), before)
    model.train()
    (model(x).square().sum() + model.kl().total).backward()
    assert all(p.grad is not None for p in find_holder(model).parameters())
