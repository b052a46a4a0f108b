"""The trainer mixin: the KL counts once, whatever the accumulation and the number of processes."""

import math

import datasets
import pytest
import torch
from peft import PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from adapter.cases import SIZES, VOCABULARY, adapted, base_model, config, logits, tokens
from bayeslora import BayesLoraConfig, find_holder
from bayeslora.adapter import lean_layers
from bayeslora.train import BayesLoraSFTTrainer, BayesLoraTrainer, BayesLoraTrainerMixin
from bayeslora.train.optimise import multiplier_of, parameter_kinds
from rounding import summed
from tiers import some
from train.two_processes import on_two_processes

BETA = 1e-2
LABELS = 5
"""Of every row, whose first token nothing predicts."""
SETTINGS = {"settings": {"flow_depth": 0}}  # an exact KL, so that its gradient is known


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.ids = tokens(batch=count, seed=1)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def arguments(folder, **settings):
    defaults = {
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **settings})


def tokenizer():
    """One word for each number, as TRL insists on a tokenizer."""
    words = {str(number): number for number in range(VOCABULARY)}
    model = Tokenizer(WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="1", pad_token="2")


def one_step(folder, beta, **settings):
    """Parameters after one step of gradient descent at learning rate 1."""
    return train(folder, beta, {"max_steps": 1, "learning_rate": 1.0, **settings})


def twenty_steps(folder, **settings):
    """Parameters after twenty steps over all rows at once."""
    return train(folder, BETA, {"max_steps": 20, "learning_rate": 0.02, **settings})[0]


def train(folder, beta, settings, rows=None, scaling="elbo"):
    model = adapted(**SETTINGS)
    model.seed_draws(0)
    trainer = BayesLoraTrainer(model=model, args=arguments(folder, **settings), train_dataset=rows or Rows(8))
    trainer.kl_beta, trainer.kl_scaling = beta, scaling
    trainer.rate_multipliers = {}  # one rate for all, so that a step is the gradient
    trainer.train()
    return {n: p.detach().clone() for n, p in find_holder(model).named_parameters()}, trainer


def kl_factor(with_kl, without, weight):
    """How many times the KL's gradient reached the optimiser."""
    model = adapted(**SETTINGS)
    find_holder(model).kl().total.backward()
    moved, expected = [], []
    for name, parameter in find_holder(model).named_parameters():
        if parameter.grad is not None:
            moved.append((without[name] - with_kl[name]).flatten().double())
            expected.append(weight * parameter.grad.flatten().double())
    moved, expected = torch.cat(moved), torch.cat(expected)
    return float(moved @ expected / (expected @ expected))


@pytest.mark.parametrize(
    "accumulation, smoothing", some([(1, 0.0), (1, 0.1), (4, 0.0), (4, 0.1)], [(1, 0.0), (4, 0.1)])
)
def test_the_kl_counts_once_under_accumulation(tmp_path, accumulation, smoothing):
    settings = {
        "per_device_train_batch_size": 8 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "label_smoothing_factor": smoothing,
    }
    without, _ = one_step(tmp_path, 0.0, **settings)
    with_kl, trainer = one_step(tmp_path, BETA, **settings)
    assert trainer.kl_weight == pytest.approx(BETA / 8)
    assert kl_factor(with_kl, without, trainer.kl_weight / LABELS) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("rows", "accumulation"), some([(8, 1), (4, 2), (2, 4), (3, 2)], [(8, 1), (2, 4)]))
def test_the_kl_counts_once_in_a_last_step_with_fewer_examples(tmp_path, rows, accumulation):
    """Nine examples in an epoch: its last step has fewer than the others, and its KL the same weight beside the mean."""
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation, "num_train_epochs": 1}
    _, trainer = train(tmp_path, BETA, {**settings, "learning_rate": 0.0}, Rows(9))
    expected = BETA / (9 * LABELS) * float(find_holder(trainer.model).kl().learnt.detach())
    logged = [log["kl_weighted"] for log in trainer.state.log_history if "kl_weighted" in log]
    assert len(logged) == -(-9 // (rows * accumulation)) and logged == pytest.approx([expected] * len(logged), rel=1e-3)


@pytest.mark.parametrize("problem", ["single_label_classification", "regression", "multi_label_classification"])
def test_a_step_over_labels_of_examples_is_the_same_under_accumulation(tmp_path, problem):
    """Models ignore the number of such labels that the trainer counts: likelihood and KL have the weight of one batch."""
    labels = torch.arange(8) % 3 if problem.startswith("single") else torch.linspace(0, 1, 24).view(8, 3)

    class Labelled(Rows):
        def __getitem__(self, index):
            return {"input_ids": self.ids[index], "labels": labels[index]}

    def after_a_step(accumulation, beta):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            told = LlamaConfig(**SIZES, num_labels=3, pad_token_id=0, problem_type=problem)
            posterior = {"posterior": "meanfield", "r": 2, "settings": {"init_sd": 1e-6}, "init_weights": False}
            targets = {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}
            model = get_peft_model(LlamaForSequenceClassification(told), BayesLoraConfig(**targets, **posterior))
        one = {"max_steps": 1, "learning_rate": 1e-3, "gradient_accumulation_steps": accumulation}
        settings = arguments(tmp_path, per_device_train_batch_size=8 // accumulation, **one)
        trainer = BayesLoraTrainer(model=model, args=settings, train_dataset=Labelled(8))
        trainer.kl_beta, trainer.rate_multipliers, trainer.aim = beta, {}, 0
        before = {name: p.detach().clone() for name, p in find_holder(model).named_parameters()}
        trainer.train()
        return torch.cat([(p.detach() - before[n]).flatten() for n, p in find_holder(model).named_parameters()])

    for beta in (0.0, BETA):
        whole, parts = after_a_step(1, beta), after_a_step(4, beta)
        assert float(parts @ whole / (whole @ whole)) == pytest.approx(1.0, abs=1e-3)


def test_a_loss_of_ones_own_is_told_the_number_of_labels(tmp_path):
    """Whatever the labels: it divides by their number, and the trainer does not."""
    told = []

    def loss(outputs, labels, num_items_in_batch=None):
        told.append(num_items_in_batch)
        return outputs.logits[:, -1].mean()

    rows = [{"input_ids": ids, "labels": ids[0]} for ids in Rows(8).ids]
    settings = arguments(tmp_path, max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer = BayesLoraTrainer(model=adapted(**SETTINGS), args=settings, train_dataset=rows, compute_loss_func=loss)
    trainer.aim = 0
    trainer.train()
    assert len(told) == 2 and None not in told


def test_rows_that_are_joined_into_one_count_as_a_full_batch(tmp_path):
    _, trainer = one_step(tmp_path, BETA, per_device_train_batch_size=4)
    row = {"labels": torch.zeros(1, 12, dtype=torch.long)}
    assert trainer._rows(row) == 1
    assert trainer._rows({**row, "position_ids": torch.arange(12)[None]}) == trainer._rows({}) == 4


def test_lean_layers_take_the_same_step(tmp_path, monkeypatch):
    plain, _ = one_step(tmp_path, BETA)
    monkeypatch.setattr(lean_layers, "LEAN", ("cpu",))
    lean, trainer = one_step(tmp_path, BETA)
    assert len(trainer._lean.forwards) == 9  # two attentions, two gated layers and five norms
    start = {name: p.detach() for name, p in find_holder(adapted(**SETTINGS)).named_parameters()}
    for name, value in plain.items():
        step = value - start[name]
        torch.testing.assert_close(
            lean[name] - start[name], step, **summed(torch.cat([step.flatten(), value.flatten()]))
        )


class Ragged(Rows):
    """One label counts in the first row, two in the second, and so on."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        labels = row["labels"].clone()
        labels[: len(labels) - 1 - index % LABELS] = -100
        return {**row, "labels": labels}


@pytest.mark.parametrize(
    "accumulation, scaling",
    some([(count, scaling) for count in (1, 2, 4) for scaling in ("elbo", "paper")], [(2, "elbo"), (1, "paper")]),
)
def test_the_evidence_counts_every_label(tmp_path, accumulation, scaling):
    """A step over all 8 rows, whose loss is a mean over their 21 labels, has the KL once beside their sum."""
    settings = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    settings |= {"max_steps": 1, "learning_rate": 1.0}
    found = [train(tmp_path, beta, settings, Ragged(8), scaling) for beta in (BETA, 0.0)]
    weight = BETA / 21 if scaling == "elbo" else found[0][1].kl_weight
    assert kl_factor(found[0][0], found[1][0], weight) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    "settings",
    some(
        [{}, {"gradient_accumulation_steps": 2}, {"label_smoothing_factor": 0.1}], [{"gradient_accumulation_steps": 2}]
    ),
)
def test_batches_without_any_label_that_counts_are_no_harm(tmp_path, settings):
    """Every second row is masked as a whole. Of LoRA's parameters a mean over nothing would leave no number."""

    class Masked(Rows):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return {**row, "labels": torch.full_like(row["labels"], -100)} if index % 2 else row

    model = adapted(**SETTINGS)
    told = arguments(tmp_path, max_steps=8, learning_rate=0.01, per_device_train_batch_size=1, **settings)
    trainer = BayesLoraTrainer(model=model, args=told, train_dataset=Masked(8))
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in find_holder(model).parameters())
    logged = [entry["nll"] for entry in trainer.state.log_history if "nll" in entry]
    assert logged and all(math.isfinite(value) for value in logged)


def _stepped(rank, folder):
    results = {}
    for accumulation in (1, 4):
        settings = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
        for beta in (0.0, BETA):
            results[accumulation, beta], _ = one_step(folder, beta, ddp_backend="gloo", **settings)
    results["twenty"] = twenty_steps(folder, ddp_backend="gloo", per_device_train_batch_size=4)
    return {key: {name: value.numpy() for name, value in values.items()} for key, values in results.items()}


@pytest.mark.system
def test_the_kl_counts_once_on_two_processes(tmp_path, free_port):
    results = {
        (rank, *(key if isinstance(key, tuple) else (key,))): {n: torch.from_numpy(v) for n, v in values.items()}
        for rank, found in enumerate(on_two_processes(_stepped, tmp_path, free_port))
        for key, values in found.items()
    }
    for accumulation in (1, 4):
        with_kl, without = results[0, accumulation, BETA], results[0, accumulation, 0.0]
        assert kl_factor(with_kl, without, BETA / 8 / LABELS) == pytest.approx(1.0, abs=1e-3)
        other = results[1, accumulation, BETA]
        assert all(torch.equal(value, other[name]) for name, value in with_kl.items())
    # one draw for all rows, so two processes must end where a single one does
    single = twenty_steps(tmp_path / "single", per_device_train_batch_size=8)
    for name, value in single.items():
        torch.testing.assert_close(results[0, "twenty"][name], value, atol=1e-4, rtol=1e-3)
        assert torch.equal(results[0, "twenty"][name], results[1, "twenty"][name])


def test_scales_move_though_a_trainer_casts_the_adapter(tmp_path):
    """TRL casts every trainable parameter of a quantised model to bfloat16, where small steps vanish."""

    class Casting(Trainer):
        def __init__(self, model, **kwargs):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.bfloat16()
            super().__init__(model=model, **kwargs)

    class Ours(BayesLoraTrainerMixin, Casting):
        pass

    model = adapted(init_weights=True)
    args = arguments(tmp_path, max_steps=3, learning_rate=5e-4)
    args.optim = "adamw_torch"
    trainer = Ours(model=model, args=args, train_dataset=Rows(8))
    holder = find_holder(model)
    assert {p.dtype for p in holder.parameters()} == {torch.float32}
    logits_of_scales = {n: p.detach().clone() for n, p in holder.named_parameters() if "logit" in n}
    trainer.train()
    for name, before in logits_of_scales.items():
        assert not torch.equal(before, holder.get_parameter(name)), name


def test_likelihood_and_kls_are_logged_apart(tmp_path):
    _, trainer = one_step(tmp_path, 1.0)
    log = trainer.state.log_history[0]
    assert log["kl_conditional"] > log["kl_inducing"] > 0
    assert log["loss"] == pytest.approx(
        log["nll"] + trainer.kl_weight / LABELS * (log["kl_inducing"] + log["kl_conditional"]), rel=1e-3
    )


def test_a_constant_of_the_kl_does_not_hide_the_loss_in_the_log(tmp_path):
    """With the default posterior, whose widths are fixed."""
    model = adapted(posterior="decoupled", init_weights=True)
    trainer = BayesLoraTrainer(model=model, args=arguments(tmp_path, max_steps=1), train_dataset=Rows(8))
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(log["nll"] + log["kl_weighted"], rel=1e-3)
    assert log["kl_weighted"] == pytest.approx(trainer.kl_weight / LABELS * log["kl_mean"], rel=1e-3)
    assert log["kl_conditional"] > 10 * log["kl_mean"] > 0


def test_an_evaluation_takes_nothing_from_the_log_of_training(tmp_path):
    told = arguments(tmp_path, max_steps=4, logging_steps=4, eval_strategy="steps", eval_steps=3)
    trainer = BayesLoraTrainer(model=adapted(**SETTINGS), args=told, train_dataset=Rows(8), eval_dataset=Rows(4))
    trainer.train()
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    (trained,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert trained["loss"] == pytest.approx(trained["nll"] + trained["kl_weighted"], rel=1e-3)
    assert evaluated and not any("nll" in entry for entry in evaluated)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_log_adds_up_and_has_the_rate_that_was_set(tmp_path, accumulation):
    settings = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    told = arguments(tmp_path, max_steps=2, learning_rate=0.03, **settings)
    trainer = BayesLoraTrainer(model=adapted(**SETTINGS), args=told, train_dataset=Rows(8))
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        assert list(entry)[:2] == ["nll", "kl_weighted"]
        assert entry["loss"] == pytest.approx(entry["nll"] + entry["kl_weighted"], rel=1e-3)
        assert 0 < entry["learning_rate"] <= 0.03
    assert trainer.state.log_history[0]["learning_rate"] == pytest.approx(0.03)
    assert len({group["lr"] for group in trainer.optimizer.param_groups}) > 1


def test_only_points_are_decayed(tmp_path):
    for told, decayed in (
        ({"posterior": "inducing"}, []),
        ({"posterior": "point"}, ["A", "B"]),
        ({"posterior": "blob"}, ["B"]),
    ):
        trainer = BayesLoraTrainer(model=adapted(**told), args=arguments(tmp_path), train_dataset=Rows(8))
        names = [it for it in trainer.get_decay_parameter_names(trainer.model) if "weight_posterior" in it]
        assert sorted({name.rpartition("default.")[2][0] for name in names}) == decayed


def test_kinds_of_parameters_have_rates_of_their_own(tmp_path):
    model = adapted()
    args = arguments(tmp_path, learning_rate=1e-3, weight_decay=0.1)
    args.optim = "adamw_torch"
    trainer = BayesLoraTrainer(model=model, args=args, train_dataset=Rows(8))
    optimiser = trainer.create_optimizer()
    kinds, posterior = parameter_kinds(model), find_holder(model).posterior("default")
    rates = {id(p): group["lr"] for group in optimiser.param_groups for p in group["params"]}
    assert {kinds[name] for name in kinds} == {"points", "diagonals", "mean", "scale", "flow"}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert rates[id(parameter)] == pytest.approx(1e-3 * posterior.hints.rate_multipliers.get(kinds[name], 1.0))
    assert sum(len(group["params"]) for group in optimiser.param_groups) == len(kinds)
    assert {group["weight_decay"] for group in optimiser.param_groups} == {0.0}


def test_adapters_have_rates_of_their_own(tmp_path):
    model = adapted(posterior="inducing")
    model.add_adapter("other", config(posterior="decoupled"))
    model.base_model.set_adapter(["default", "other"])
    trainer = BayesLoraTrainer(model=model, args=arguments(tmp_path, learning_rate=1e-3), train_dataset=Rows(8))
    rates = {id(p): group["lr"] for group in trainer.create_optimizer().param_groups for p in group["params"]}
    holder = find_holder(model)
    for name in holder.active:
        posterior = holder.posterior(name)
        for own, parameter in posterior.named_parameters():
            wanted = multiplier_of(posterior.kind(own), posterior.hints.rate_multipliers)
            assert rates[id(parameter)] == pytest.approx(1e-3 * wanted)


def test_the_kl_on_scales_does_not_crush_the_data_gradient(tmp_path):
    """One common norm would divide the data's gradient by that of the scales."""
    start = {n: p.detach().clone() for n, p in find_holder(adapted(**SETTINGS)).named_parameters()}
    moved = {}
    for beta in (0.0, 0.1):
        settings = {"max_steps": 1, "learning_rate": 1.0, "max_grad_norm": 1e-4, "per_device_train_batch_size": 8}
        after, trainer = train(tmp_path, beta, settings)
        assert trainer.state.log_history[0]["grad_norm"] > 1e-4  # there was something to clip
        moved[beta] = torch.cat([(after[n] - start[n]).flatten() for n in start if ".z_" in n])
    assert moved[0.1].norm() > 0.5 * moved[0.0].norm() > 0


@pytest.mark.parametrize(
    "targets, given",
    some(
        [
            (targets, given)
            for targets in (["q_proj", "k_proj"], ["q_proj", "lm_head"])
            for given in ("model", "config")
        ],
        [(["q_proj", "lm_head"], "config")],
    ),
)
def test_trl_trains_every_parameter(tmp_path, targets, given):
    trl = pytest.importorskip("trl")
    from bayeslora.train import BayesLoraSFTTrainer as Ours

    assert issubclass(Ours, trl.SFTTrainer) and issubclass(Ours, BayesLoraTrainerMixin)
    args = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=2, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True,
        logging_steps=1, per_device_train_batch_size=4, disable_tqdm=True, bf16=False, max_length=16,
    )  # fmt: skip
    rows = datasets.Dataset.from_dict({"input_ids": tokens(batch=8).tolist()})
    if given == "model":
        trainer = Ours(adapted(target_modules=targets), args=args, train_dataset=rows, processing_class=tokenizer())
    else:
        config = BayesLoraConfig(task_type="CAUSAL_LM", target_modules=targets)
        trainer = Ours(base_model(), peft_config=config, args=args, train_dataset=rows, processing_class=tokenizer())
    posterior = find_holder(trainer.model).posterior("default")
    before = {name: p.detach().clone() for name, p in posterior.named_parameters()}
    trainer.train()
    still = [name for name, p in posterior.named_parameters() if torch.equal(p, before[name])]
    assert not [name for name in still if not name.startswith("flow_")]  # hidden layers of the flow start a step later
    log = trainer.state.log_history[0]
    assert log["kl_conditional"] > 0 and log["kl_inducing"] > 0 and log["nll"] > 0


def test_a_loss_of_trl_that_would_be_replaced_by_another_is_refused(tmp_path):
    trl = pytest.importorskip("trl")
    from bayeslora.train import BayesLoraSFTTrainer as Ours

    args = trl.SFTConfig(output_dir=str(tmp_path), loss_type="dft", report_to=[], use_cpu=True, bf16=False)
    rows = datasets.Dataset.from_dict({"input_ids": tokens(batch=8).tolist()})
    with pytest.raises(ValueError, match=r"loss_type is 'dft'.* leave lm_head out of target_modules"):
        Ours(adapted(target_modules=["lm_head"]), args=args, train_dataset=rows, processing_class=tokenizer())
    Ours(adapted(target_modules=["q_proj"]), args=args, train_dataset=rows, processing_class=tokenizer())


PAIRS = datasets.Dataset.from_list([{"prompt": "3 4 5", "chosen": " 6 7", "rejected": " 8 9"}] * 4)


def preferring(folder, model, targets=("q_proj",), **settings):
    """A trainer of TRL whose loss compares with a reference; gradient checkpointing is TRL's default."""
    trl = pytest.importorskip("trl")

    class Ours(BayesLoraTrainerMixin, trl.DPOTrainer):
        pass

    given = {"report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True}
    args = trl.DPOConfig(str(folder), per_device_train_batch_size=2, max_steps=1, logging_steps=1, **given, **settings)
    return Ours(model, args=args, train_dataset=PAIRS, processing_class=words(), peft_config=config_of(model, targets))


def config_of(model, targets):
    """Settings of a new adapter; none if the model has one."""
    given = {"target_modules": list(targets), "posterior": "inducing", "settings": {"flow_depth": 0}}
    return None if isinstance(model, PeftModel) else BayesLoraConfig(task_type="CAUSAL_LM", **given)


def words():
    made = tokenizer()
    made.backend_tokenizer.pre_tokenizer = Whitespace()
    return made


def test_trl_compares_with_the_base_model(tmp_path):
    """And not with draws from a copy of a new adapter, which TRL makes of one that was trained."""
    trainer = preferring(tmp_path, base_model())
    assert list(trainer.model.peft_config) == ["default"]
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(log["nll"] + log["kl_weighted"], rel=1e-3)


def test_trl_compares_with_an_adapter_that_was_trained(tmp_path):
    trainer = preferring(tmp_path, adapted(**SETTINGS, target_modules=["q_proj"]))
    assert list(trainer.model.peft_config) == ["default", "ref"]
    before = trainer.model.peft_config["default"].posterior, find_holder(trainer.model).kl().total.item()
    trainer.train()
    assert before[0] == "inducing" and find_holder(trainer.model).kl().total.item() != before[1]


@pytest.mark.parametrize("posterior", ["inducing", "swag"])  # a mean of parameters, and one of buffers
def test_trl_compares_with_the_mean_of_an_adapter_that_was_trained(tmp_path, posterior):
    model = adapted(posterior=posterior, target_modules=["q_proj"], lora_dropout=0.5)
    for buffer in find_holder(model).posterior("default").buffers():
        buffer += 0.2 if buffer.is_floating_point() else 3
    mean = logits(model)
    preferring(tmp_path, model)
    assert torch.equal(logits(model), mean)
    assert not torch.equal(logits(model.train()), mean)  # what is trained has dropout, and draws if it has noise
    model.set_adapter("ref")
    torch.testing.assert_close(logits(model), mean)


def test_an_own_adapter_of_the_name_of_a_reference_is_left_alone(tmp_path):
    model = adapted(target_modules=["q_proj"])
    model.add_adapter("ref", config("llama", target_modules=["q_proj"], seed=3))
    before = find_holder(model).posterior("ref").mean().A[0].detach().clone()
    BayesLoraTrainer(model, arguments(tmp_path), train_dataset=Rows(4))
    assert torch.equal(find_holder(model).posterior("ref").mean().A[0], before)
    model.train().set_adapter("ref")
    assert not torch.equal(logits(model), logits(model))


def test_an_adapter_on_the_head_is_refused_where_the_loss_would_bypass_it(tmp_path):
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        preferring(tmp_path, base_model(), ["q_proj", "lm_head"])


def test_an_own_loss_is_kept_with_an_adapter_on_the_head(tmp_path):
    class Doubled(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            return (2.0 * loss, outputs) if return_outputs else 2.0 * loss

    class Ours(BayesLoraTrainerMixin, Doubled):
        pass

    model = adapted(target_modules=["lm_head"])
    told = arguments(tmp_path, per_device_eval_batch_size=4)
    plain, doubled = (kind(model=model, args=told, eval_dataset=Rows(4)) for kind in (BayesLoraTrainer, Ours))
    assert doubled.evaluate()["eval_loss"] == pytest.approx(2.0 * plain.evaluate()["eval_loss"])


def test_a_frozen_adapter_is_evaluated_and_not_trained(tmp_path):
    model = adapted(inference_mode=True)
    trainer = BayesLoraTrainer(model=model, args=arguments(tmp_path), train_dataset=Rows(4), eval_dataset=Rows(4))
    trainer.evaluate()
    with pytest.raises(ValueError, match=r"no parameter of the model is trained: .* is_trainable=True"):
        trainer.train()


def test_a_second_adapter_is_not_made_in_place_of_one_that_was_trained(tmp_path):
    with pytest.raises(ValueError, match="the model has an adapter already: leave peft_config out to train that one"):
        BayesLoraTrainer(adapted(), arguments(tmp_path), train_dataset=Rows(4), peft_config=BayesLoraConfig())


def test_a_function_that_makes_the_model_makes_the_adapter_too(tmp_path):
    given = {"args": arguments(tmp_path), "train_dataset": Rows(4)}
    with pytest.raises(ValueError, match="peft_config needs a model to adapt: give one, or let model_init return"):
        BayesLoraTrainer(model_init=base_model, peft_config=BayesLoraConfig(), **given)
    trainer = BayesLoraTrainer(model_init=lambda: adapted(), **given)
    trainer.train()
    assert any("kl_weighted" in row for row in trainer.state.log_history)


def test_a_model_without_our_adapter_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no adapter of bayeslora; make one with get_peft_model"):
        BayesLoraTrainer(model=base_model(), args=arguments(tmp_path), train_dataset=Rows(4))


def test_a_name_is_refused_where_only_models_are_taken(tmp_path):
    for more in ({}, {"peft_config": BayesLoraConfig()}):
        with pytest.raises(ValueError, match=r"model is the name 'org/name', .*from_pretrained\('org/name'\)"):
            BayesLoraTrainer("org/name", arguments(tmp_path), train_dataset=Rows(4), **more)


@pytest.mark.parametrize("kind", some(["SFTTrainer", "DPOTrainer"], ["SFTTrainer"]))
def test_a_name_is_taken_where_trl_takes_it(tmp_path, kind):
    """Also by a trainer in between that hands all arguments on."""
    trl = pytest.importorskip("trl")
    theirs, settings = getattr(trl, kind), getattr(trl, kind.replace("Trainer", "Config"))

    class Between(theirs):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    class Ours(BayesLoraTrainerMixin, Between):
        pass

    base_model().save_pretrained(tmp_path / "model")
    words().save_pretrained(tmp_path / "model")
    args = settings(str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False)
    rows = PAIRS if kind == "DPOTrainer" else datasets.Dataset.from_dict({"input_ids": tokens(batch=8).tolist()})
    told = BayesLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    trainer = Ours(str(tmp_path / "model"), args=args, train_dataset=rows, peft_config=told)
    assert list(trainer.model.peft_config) == ["default"] and find_holder(trainer.model).active == ["default"]


def test_a_dataset_without_length_is_refused(tmp_path):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield {"input_ids": tokens()[0], "labels": tokens()[0]}

    trainer = BayesLoraTrainer(model=adapted(), args=arguments(tmp_path, max_steps=1), train_dataset=Endless())
    with pytest.raises(ValueError, match="needs the number of training examples"):
        trainer.train()


def test_widths_that_only_their_own_optimiser_may_move_are_refused(tmp_path):
    with pytest.raises(ValueError, match="posterior 'ivon' is trained by steps of its own"):
        BayesLoraTrainer(model=adapted(posterior="ivon"), args=arguments(tmp_path), train_dataset=Rows(8))


@pytest.mark.parametrize("posterior", ["laplace", "tfb"])
def test_posteriors_that_are_fitted_to_a_lora_are_refused(tmp_path, posterior):
    with pytest.raises(
        ValueError, match=f"posterior '{posterior}' is fitted to a trained LoRA and learns nothing here"
    ):
        BayesLoraTrainer(model=adapted(posterior=posterior), args=arguments(tmp_path), train_dataset=Rows(8))


@pytest.mark.parametrize("accumulation", [2, 4])
def test_an_amortised_kl_of_labels_of_examples_counts_once_under_accumulation(tmp_path, accumulation):
    """The trainer divides the whole objective there."""

    def gradient(parts):
        torch.manual_seed(0)
        base = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=3, pad_token_id=0))
        model = get_peft_model(
            base, BayesLoraConfig(task_type="SEQ_CLS", posterior="contextual", target_modules=["q_proj"])
        )
        rows = [{"input_ids": ids, "labels": k % 3} for k, ids in enumerate(tokens(batch=4))]
        told = arguments(
            tmp_path,
            max_steps=1,
            per_device_train_batch_size=4 // parts,
            gradient_accumulation_steps=parts,
            max_grad_norm=0.0,
        )
        trainer = BayesLoraTrainer(model=model, args=told, train_dataset=rows)
        trainer.train()
        return trainer.state.log_history[0]["kl_weighted"]

    assert gradient(accumulation) == pytest.approx(gradient(1), rel=0.3)  # its noise differs


def test_label_smoothing_of_trl_learns_the_kl_at_the_draw_of_the_loss(tmp_path):
    """It computes the loss with a pass of its own, without gradients, before the backward pass."""
    trl = pytest.importorskip("trl")
    rows = datasets.Dataset.from_list([{"prompt": "3 4 5", "completion": " 6 7"}] * 8)
    given = {"report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True}

    def moved(**settings):
        model = adapted(posterior="inducing", target_modules=["q_proj"], settings={"flow_depth": 1})
        model.seed_draws(0)
        args = trl.SFTConfig(str(tmp_path), max_steps=1, learning_rate=1e-3, max_grad_norm=0.0, **given, **settings)
        trainer = BayesLoraSFTTrainer(model, args=args, train_dataset=rows, processing_class=words())
        trainer.train()
        return {name: p.detach().clone() for name, p in model.named_parameters() if ".flow" in name}

    checkpointed, kept = (
        moved(label_smoothing_factor=0.1),
        moved(label_smoothing_factor=0.1, gradient_checkpointing=False),
    )
    for name, value in kept.items():
        torch.testing.assert_close(checkpointed[name], value)


def test_trl_predicts_texts_that_it_compares_by_the_same_network(tmp_path):
    trl = pytest.importorskip("trl")
    trainer = preferring(tmp_path, base_model())
    assert find_holder(trainer.model).most_draws == 1
    rows = datasets.Dataset.from_list([{"prompt": "3 4 5", "completion": " 6 7"}] * 4)
    args = trl.SFTConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False)
    trainer = BayesLoraSFTTrainer(adapted(), args=args, train_dataset=rows, processing_class=words())
    assert find_holder(trainer.model).most_draws is None


def test_aiming_leaves_no_trace_in_the_metrics_of_trl(tmp_path):
    trl = pytest.importorskip("trl")
    rows = datasets.Dataset.from_list([{"prompt": "3 4 5", "completion": " 6 7"}] * 4)
    args = trl.SFTConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False)
    trainer = BayesLoraSFTTrainer(
        adapted(**SETTINGS | {"init_weights": True}), args=args, train_dataset=rows, processing_class=words()
    )
    trainer._aim()
    assert not any(trainer._metrics["eval"].values())


def test_it_aims_at_the_gradient_of_the_first_batches_and_changes_nothing_else(tmp_path):
    start = SETTINGS | {"init_weights": True}
    rows = Rows(8)

    def parameters(model):
        return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}

    def after_no_step(aim, **more):
        model = adapted(**start)
        settings = arguments(tmp_path, max_steps=1, learning_rate=0.0, per_device_train_batch_size=8, **more)
        trainer = BayesLoraTrainer(model=model, args=settings, train_dataset=rows)
        trainer.aim = aim
        trainer.train()
        return parameters(model), trainer.state.log_history[0]["epoch"]

    wanted = adapted(**start)
    wanted.base_model.aim([lambda: wanted(input_ids=rows.ids, labels=rows.ids).loss])
    (aimed, epoch), (left, same) = after_no_step(1), after_no_step(0)
    assert epoch == same == 1
    moved = [name for name in aimed if not torch.equal(aimed[name], left[name])]
    assert moved
    assert all("z_row_B" in name for name in moved)
    by_rows, _ = after_no_step(1, gradient_checkpointing=True)  # where a batch may not fit
    for name, expected in parameters(wanted).items():
        for found in (aimed, by_rows):
            torch.testing.assert_close(found[name].abs(), expected.abs(), rtol=1e-3, atol=1e-4)
