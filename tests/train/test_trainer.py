"""The trainer mixin: the KL counts once, whatever the accumulation and the number of processes."""

import os

import pytest
import torch
import torch.multiprocessing
from transformers import Trainer, TrainingArguments

from adapter.cases import adapted, tokens
from bayeslora import find_holder
from bayeslora.train import BayesLoraTrainer, BayesLoraTrainerMixin

BETA = 1e-3
SETTINGS = {"settings": {"flow_depth": 0}}  # an exact KL, so that its gradient is known


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.ids = tokens(batch=count, seed=1)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def arguments(folder, **settings):
    return TrainingArguments(
        output_dir=str(folder),
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **settings,
    )


def one_step(folder, beta, **settings):
    """Parameters after one step of gradient descent at learning rate 1."""
    return train(folder, beta, {"max_steps": 1, "learning_rate": 1.0, **settings})


def twenty_steps(folder, **settings):
    """Parameters after twenty steps over all rows at once."""
    return train(folder, BETA, {"max_steps": 20, "learning_rate": 0.02, **settings})[0]


def train(folder, beta, settings):
    model = adapted(**SETTINGS)
    model.seed_draws(0)
    trainer = BayesLoraTrainer(model=model, args=arguments(folder, **settings), train_dataset=Rows(8))
    trainer.kl_beta = beta
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


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_kl_counts_once_under_accumulation(tmp_path, accumulation, smoothing):
    settings = {
        "per_device_train_batch_size": 8 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "label_smoothing_factor": smoothing,
    }
    without, _ = one_step(tmp_path, 0.0, **settings)
    with_kl, trainer = one_step(tmp_path, BETA, **settings)
    assert trainer.kl_weight == pytest.approx(BETA / 8)
    assert kl_factor(with_kl, without, trainer.kl_weight) == pytest.approx(1.0, abs=1e-3)


def _process(rank, folder, port, results):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    for accumulation in (1, 4):
        settings = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
        for beta in (0.0, BETA):
            values, _ = one_step(f"{folder}/{rank}", beta, ddp_backend="gloo", **settings)
            results[rank, accumulation, beta] = {name: value.numpy() for name, value in values.items()}
    values = twenty_steps(f"{folder}/{rank}", ddp_backend="gloo", per_device_train_batch_size=4)
    results[rank, "twenty"] = {name: value.numpy() for name, value in values.items()}
    torch.distributed.destroy_process_group()


def test_the_kl_counts_once_on_two_processes(tmp_path, free_port):
    with torch.multiprocessing.get_context("spawn").Manager() as manager:
        shared = manager.dict()
        torch.multiprocessing.spawn(_process, (str(tmp_path), free_port, shared), nprocs=2)
        results = {key: {n: torch.from_numpy(v) for n, v in values.items()} for key, values in shared.items()}
    for accumulation in (1, 4):
        with_kl, without = results[0, accumulation, BETA], results[0, accumulation, 0.0]
        assert kl_factor(with_kl, without, BETA / 8) == pytest.approx(1.0, abs=1e-3)
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
        log["nll"] + trainer.kl_weight * (log["kl_inducing"] + log["kl_conditional"]), rel=1e-3
    )


def test_no_weight_decay_on_the_posterior(tmp_path):
    model = adapted()
    trainer = BayesLoraTrainer(model=model, args=arguments(tmp_path), train_dataset=Rows(8))
    assert not trainer.get_decay_parameter_names(model) or all(
        "weight_posterior" not in name for name in trainer.get_decay_parameter_names(model)
    )


def test_a_dataset_without_length_is_refused(tmp_path):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield {"input_ids": tokens()[0], "labels": tokens()[0]}

    trainer = BayesLoraTrainer(model=adapted(), args=arguments(tmp_path, max_steps=1), train_dataset=Endless())
    with pytest.raises(ValueError, match="needs the number of training examples"):
        trainer.train()
