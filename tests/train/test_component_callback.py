"""Trainers of transformers and TRL: a component that has learnt nothing goes on as a copy of the best."""

import logging

import datasets
import pytest
import torch
from peft import get_peft_model
from transformers import (
    BertConfig,
    BertForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
    default_data_collator,
)
from trl import SFTConfig

from adapter.cases import VOCABULARY, adapted, tokens
from bayeslora import BayesLoraConfig, find_holder
from bayeslora.train import BayesLoraSFTTrainer, BayesLoraTrainer, component_callback
from bayeslora.train.component_callback import ReplaceFailedComponents
from bayeslora.train.components import failed_components
from train.test_components import COMPONENTS, model
from train.test_trainer import Rows, arguments, tokenizer
from train.two_processes import on_two_processes

LOST = 1


def components_of(trained):
    """Parameters of each component, as one vector."""
    found = [it.detach().transpose(0, 1).flatten(1) for it in find_holder(trained).component_parameters()]
    return list(torch.cat(found, dim=1))


def made(given, folder, rows=None, **settings):
    options = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "optim": "adamw_torch", "learning_rate": 0.0}
    told = arguments(folder, **{**options, **settings})
    return BayesLoraTrainer(model=given, args=told, train_dataset=rows or Rows(12))


def trained(given, folder, **settings):
    trainer = made(given, folder, **settings)
    trainer.train()
    return trainer


def warnings_of(caplog):
    return [it.getMessage() for it in caplog.records if it.name == "bayeslora.train" and it.levelno == logging.WARNING]


def test_a_component_that_is_lost_becomes_the_best_and_others_stay(tmp_path, caplog):
    given = model(lost=LOST)
    before = components_of(given)
    trainer = trained(given, tmp_path)  # at a learning rate of zero
    after = components_of(given)
    (told,) = warnings_of(caplog)
    assert told.startswith(f"epoch 1: component {LOST + 1} of {COMPONENTS} has learnt nothing")
    assert any(torch.equal(after[LOST], it) for k, it in enumerate(before) if k != LOST)
    assert all(torch.equal(after[k], before[k]) for k in range(COMPONENTS) if k != LOST)
    _, *losses = ReplaceFailedComponents(trainer)._losses(COMPONENTS, seed=0)
    assert max(losses) < 2 * min(losses) and given.training


def test_losses_are_those_of_each_component_alone(tmp_path):
    """Over the labels that count."""
    ids = Rows(5).ids
    labels = torch.where(torch.arange(ids.shape[1]) < 3, -100, ids)
    rows = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]
    given = model(lost=LOST)
    trainer = BayesLoraTrainer(model=given, args=arguments(tmp_path), train_dataset=rows)
    losses = ReplaceFailedComponents(trainer)._losses(COMPONENTS, seed=3)
    holder = find_holder(given)
    given.eval()
    with torch.no_grad(), holder.restoring():
        holder.draw(COMPONENTS, torch.Generator().manual_seed(3))
        logits = given(ids.repeat(COMPONENTS, 1)).logits.unflatten(0, (COMPONENTS, -1))
        with given.disable_adapter():
            base = given(ids).logits
    for found, own in zip(losses, [base, *logits], strict=True):
        wanted = torch.nn.functional.cross_entropy(own[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        assert found == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_snapshots_do_not_stand_for_components(tmp_path, seed):
    """Of the parameters that are trained, though the model predicts from snapshots of them."""
    told = {"posterior": "decoupled", "target_modules": ["q_proj", "lm_head"]}
    given = adapted(**told, snapshots=8, members=4)
    with torch.no_grad():
        for it in find_holder(given).component_parameters():
            it[:, LOST] = 3.0 * torch.randn(it[:, LOST].shape, generator=torch.Generator().manual_seed(0))
    callback = ReplaceFailedComponents(made(given.train(), tmp_path))
    want = callback._losses(COMPONENTS, seed)
    for step in range(4):
        find_holder(given).after_step(step + 1, 4)
    assert find_holder(given).posterior("default").held == 4
    assert callback._losses(COMPONENTS, seed) == want and failed_components(want[1:], want[0]) == [LOST]
    assert all(module.training for module in find_holder(given).modules())


def test_where_none_is_lost_training_is_the_same_to_the_bit(tmp_path, caplog, monkeypatch):
    found = []
    for checked in (True, False):
        if not checked:
            monkeypatch.setattr(ReplaceFailedComponents, "on_step_end", lambda *given, **more: None)
        given = model()
        given.seed_draws(0)
        trained(given, tmp_path, learning_rate=1e-3)
        found.append(components_of(given))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and not warnings_of(caplog)


def test_labels_that_are_not_tokens_say_nothing(tmp_path):
    rows = [{"input_ids": ids, "labels": ids[0]} for ids in tokens(batch=3)]
    trainer = BayesLoraTrainer(model=model(), args=arguments(tmp_path), train_dataset=rows)
    active = trainer.accelerator.gradient_state.active_dataloader
    assert ReplaceFailedComponents(trainer)._losses(COMPONENTS, seed=0) == []
    assert trainer.accelerator.gradient_state.active_dataloader is active


def test_batches_that_a_trainer_must_write_texts_for_are_left_alone(tmp_path, monkeypatch):
    """As those of TRL's GRPO, which have prompts and no labels."""
    trainer = BayesLoraTrainer(
        model=model(), args=arguments(tmp_path), train_dataset=[{"prompt": "a"}] * 3, data_collator=list
    )
    monkeypatch.setattr(trainer, "_prepare_inputs", None)  # would fail
    assert ReplaceFailedComponents(trainer)._losses(COMPONENTS, seed=0) == []


def translator():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


def tagger():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForTokenClassification(BertConfig(vocab_size=VOCABULARY, num_labels=VOCABULARY, **sizes))


@pytest.mark.parametrize("make", [translator, tagger])
def test_models_that_predict_no_next_token_are_left_alone(tmp_path, monkeypatch, make):
    """Their labels have the shape of the tokens, too, and belong to other places."""
    monkeypatch.setattr(ReplaceFailedComponents, "_losses", None)  # would fail
    given = get_peft_model(make(), BayesLoraConfig(r=2))
    assert find_holder(given).component_parameters()
    trained(given, tmp_path, num_train_epochs=1)


def test_posteriors_without_components_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(ReplaceFailedComponents, "_losses", None)  # would fail
    trained(adapted(posterior="inducing", settings={"flow_depth": 0}), tmp_path, num_train_epochs=1)


def test_examples_are_spread_over_the_training_set(tmp_path):
    trainer = BayesLoraTrainer(model=model(), args=arguments(tmp_path), train_dataset=Rows(100))
    rows = torch.cat([batch["input_ids"] for batch in ReplaceFailedComponents(trainer)._examples()])
    order = [next(k for k, own in enumerate(Rows(100).ids) if torch.equal(row, own)) for row in rows]
    assert sorted(order) == [k * 100 // 32 for k in range(32)]
    first = sorted(order[:8])
    assert max(b - a for a, b in zip([0, *first], [*first, 100], strict=True)) < 34  # also if no more are needed


def test_no_more_labels_are_looked_at_than_needed(tmp_path, monkeypatch):
    """Texts have many labels; every batch is still fetched, as accelerate expects."""
    seen, fetched = [], []
    trainer = BayesLoraTrainer(model=model(), args=arguments(tmp_path), train_dataset=Rows(40))
    callback = ReplaceFailedComponents(trainer)
    examples = callback._examples

    def watched():
        for batch in examples():
            fetched.append(len(batch["input_ids"]))
            yield batch

    monkeypatch.setattr(callback, "_examples", watched)
    monkeypatch.setattr(component_callback, "ENOUGH", 60)
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    state = trainer.accelerator.gradient_state
    active = state.active_dataloader
    few = callback._losses(COMPONENTS, seed=0)
    labels = Rows(40).ids.shape[1] - 1
    assert sum(fetched) == 32 and 60 <= sum(seen) // (1 + COMPONENTS) * labels < 60 + fetched[0] * labels
    assert len(few) == 1 + COMPONENTS and state.active_dataloader is active


def test_trl_replaces_them_too(tmp_path, caplog):
    rows = tokens(batch=12, seed=1).tolist()
    settings = {"learning_rate": 0.0, "per_device_train_batch_size": 4, "num_train_epochs": 1, "use_cpu": True}
    trainer = BayesLoraSFTTrainer(
        model(lost=LOST),
        args=SFTConfig(str(tmp_path), report_to=[], save_strategy="no", bf16=False, **settings),
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows, "labels": rows}),
        data_collator=default_data_collator,
        processing_class=tokenizer(),
    )
    trainer.train()
    assert len(warnings_of(caplog)) == 1


def _replaced(rank, folder):
    given = model(lost=LOST)
    before = components_of(given)
    trainer = made(given, folder, Rows(16), ddp_backend="gloo", num_train_epochs=1)
    losses = ReplaceFailedComponents(trainer)._losses(COMPONENTS, seed=3)
    trainer.train()
    after = components_of(given)
    sources = [k for k, it in enumerate(before) if k != LOST and torch.equal(after[LOST], it)]
    return {"sources": sources, "losses": losses}


@pytest.mark.system
def test_two_processes_replace_the_same_component_by_the_same(tmp_path, free_port):
    """By losses that are those of all examples."""
    one, other = on_two_processes(_replaced, tmp_path, free_port)
    assert one == other and len(one["sources"]) == 1
    single = ReplaceFailedComponents(made(model(lost=LOST), tmp_path / "single", Rows(16)))
    assert one["losses"] == pytest.approx(single._losses(COMPONENTS, seed=3), rel=1e-5)
