"""The objective that the adapter offers, against the bound of a whole data set written out."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForSequenceClassification

from adapter.cases import SIZES, adapted, config, generator, tokens
from bayeslora import find_holder

IGNORED = -100


def labelled(batch=3):
    """Tokens and labels, of which every row has another number that counts."""
    ids = tokens(batch=batch)
    labels = ids.clone()
    for row in range(batch):
        labels[row, : 2 * row] = IGNORED
    return ids, labels


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in find_holder(model).named_parameters() if p.grad is not None}


@pytest.mark.parametrize("posterior", ["inducing", "blob", "point"])
def test_a_batch_of_all_data_gives_the_bound_per_label(posterior):
    model = adapted(posterior=posterior).train()
    ids, labels = labelled()
    model.seed_draws(0)
    output = model(input_ids=ids, labels=labels)
    found = model.elbo(output.loss, examples=len(ids), labels=labels)
    flat = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    counted = int((labels[:, 1:] != IGNORED).sum())
    want = (flat + model.kl().total) / counted
    torch.testing.assert_close(found, want, rtol=1e-5, atol=0)


def test_a_mean_over_examples_counts_the_kl_once_per_example():
    model = adapted().train()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    kl = model.kl().total
    torch.testing.assert_close(model.elbo(loss, examples=50), loss + kl / 50)
    torch.testing.assert_close(model.elbo(loss, examples=50, labels=4, beta=0.5), loss + 0.5 * kl / 200)
    torch.testing.assert_close(model.elbo(loss, examples=50, labels=torch.zeros(2)), loss + kl / 50)


def test_several_classes_of_an_example_are_as_many_labels():
    """The loss of transformers for them is a mean over all classes of all examples."""
    base = LlamaForSequenceClassification(
        LlamaConfig(**SIZES, num_labels=4, pad_token_id=0, problem_type="multi_label_classification")
    )
    model, ids = get_peft_model(base, config(task_type=None)).train(), tokens(batch=3)
    wanted = torch.randint(2, (3, 4), generator=generator(1)).float()
    output = model(input_ids=ids, labels=wanted)
    bound = F.binary_cross_entropy_with_logits(output.logits, wanted, reduction="sum") + model.kl().total
    torch.testing.assert_close(model.elbo(output.loss, examples=3, labels=wanted), bound / 12)


def test_parts_of_a_step_add_up_to_the_whole():
    model, (ids, _) = adapted().train(), labelled(batch=4)
    whole, parts = [], []
    for halves, into in ((1, whole), (2, parts)):
        for part in ids.chunk(halves):
            model.seed_draws(0)  # the same draw for each of them
            loss = model(input_ids=part, labels=part).loss / halves
            into.append(gradients(model, model.elbo(loss, examples=10, labels=part, parts=halves)))
    for name, want in whole[0].items():
        got = sum(part[name] for part in parts)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


def test_nonsense_is_refused():
    model = adapted().train()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    for wrong in ({"examples": 0}, {"examples": 5, "parts": 0}):
        with pytest.raises(ValueError, match="need examples >= 1 and parts >= 1"):
            model.elbo(loss, **wrong)


@pytest.mark.parametrize(
    ("posterior", "with_kl", "told"), [("inducing", False, 1), ("inducing", True, 0), ("point", False, 0)]
)
def test_training_without_the_kl_is_told_once(posterior, with_kl, told, monkeypatch):
    monkeypatch.setattr("bayeslora.adapter.kl_reminder.PASSES", 3)
    model = adapted(posterior=posterior).train()
    ids, labels = labelled()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with torch.no_grad():
            for _ in range(5):
                model(input_ids=ids)
        assert not found, "nothing was trained"
        for _ in range(8):
            loss = model(input_ids=ids, labels=labels).loss
            if with_kl:
                loss = model.elbo(loss, examples=3, labels=labels)
            loss.backward()
    assert ["3 forward passes without its KL" in str(it.message) for it in found] == [True] * told
