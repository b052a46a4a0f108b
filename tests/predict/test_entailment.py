"""Answers that mean the same, by a model for natural language inference with random weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from bayeslora.errors import InputError
from bayeslora.predict.generation import entailment
from bayeslora.predict.generation.agreement import find_agreement
from bayeslora.predict.generation.entailment import find_same, load_entailment
from bayeslora.tasks.answers import same_free_answer

WORDS = ["mercury", "venus", "the", "planet", "it", "is", "8", "eight", "legs", "none"]
ANSWERS = ["Mercury", "it is mercury", "the planet mercury", "Venus", "none", "eight legs", "8"]
NAMES = {0: "CONTRADICTION", 1: "ENTAILMENT", 2: "neutral"}


def save_classifier(place: Path, names: dict[int, str]) -> str:
    """A small classifier of pairs of texts."""
    place.mkdir(parents=True)
    (place / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]), encoding="utf-8"
    )
    BertTokenizerFast(str(place / "vocab.txt")).save_pretrained(place)
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=5 + len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, id2label=names, label2id={name: number for number, name in names.items()},
        initializer_range=1.0,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_classifier(tmp_path_factory.mktemp("nli") / "model", NAMES)


def test_both_directions_must_entail(nli: str) -> None:
    same = load_entailment(nli, torch.device("cpu"))
    assert same.label == 1
    found = set()
    for left, right in combinations(ANSWERS, 2):
        logits = [
            same.model(**same.tokenizer(a, b, return_tensors="pt")).logits for a, b in ((left, right), (right, left))
        ]
        want = same_free_answer(left, right) or all(int(it.argmax()) == 1 for it in logits)
        assert same(left, right) is want is same(right, left)
        found.add(want)
    assert found == {True, False}
    assert same("Mercury", "mercury.") and not same("Mercury", "") and same("", " ")


def test_answers_are_grouped_by_it(nli: str) -> None:
    same = find_same(nli, torch.device("cpu"))
    assert find_same(None, torch.device("cpu")) is same_free_answer
    agreement = find_agreement("Mercury", ANSWERS, same)
    assert sum(share for _, share in agreement.groups) == pytest.approx(1)
    assert len(agreement.groups) < len(find_agreement("Mercury", ANSWERS).groups)
    assert agreement.share == sum(same("Mercury", answer) for answer in ANSWERS) / len(ANSWERS)
    assert agreement.others == tuple(it for it in agreement.groups if not same("Mercury", it[0]))


def test_long_answers_are_cut_off(nli: str) -> None:
    """Their tokenizer does not say how many tokens the model takes, which is 32."""
    assert load_entailment(nli, torch.device("cpu"))("mercury " * 40, "venus " * 40) in (True, False)


def test_few_pairs_are_remembered(nli: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entailment, "MOST_KNOWN", 2)
    same = replace(load_entailment(nli, torch.device("cpu")), _known={})
    found = [same("Mercury", f"venus {number}") for number in range(5)]
    assert len(same._known) <= 2 and found == [same("Mercury", f"venus {number}") for number in range(5)]


def test_what_is_no_such_model_is_refused(tmp_path: Path) -> None:
    other = save_classifier(tmp_path / "other", {0: "good", 1: "bad"})
    with pytest.raises(InputError, match=r"whose classes are good, bad; give a model with a class for entailment"):
        load_entailment(other, torch.device("cpu"))
    pickled = Path(save_classifier(tmp_path / "pickled", NAMES))
    model = BertForSequenceClassification.from_pretrained(pickled)
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"nli is '.*pickled', which cannot be loaded"):
        load_entailment(str(pickled), torch.device("cpu"))
    damaged = Path(save_classifier(tmp_path / "damaged", NAMES))
    (damaged / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"nli is '.*damaged', which cannot be loaded"):
        load_entailment(str(damaged), torch.device("cpu"))
    with pytest.raises(InputError, match=r"nli is '.*nothing', which cannot be loaded .*trained on MNLI"):
        load_entailment(str(tmp_path / "nothing"), torch.device("cpu"))
