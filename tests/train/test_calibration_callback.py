"""Calibration in a trainer's log, against the same figures from whole distributions."""

import math

import datasets
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, Trainer

from adapter.cases import VOCABULARY, adapted, base_model
from bayeslora.errors import InputError
from bayeslora.predict.mc import posterior_predictive
from bayeslora.train import BayesLoraTrainer, BayesLoraTrainerMixin, CalibrationCallback, batches
from train.test_trainer import Ragged, Rows, arguments, tokenizer
from train.two_processes import on_two_processes

NAMES = {"eval_ece", "eval_nll_draws", "eval_epistemic_share"}


def trainer_of(model, folder, data, kind=Trainer, samples=3, **settings):
    given = {"per_device_eval_batch_size": 3, **settings}
    trainer = kind(model=model, args=arguments(folder, **given), train_dataset=Rows(8), eval_dataset=data)
    trainer.add_callback(CalibrationCallback(trainer, samples=samples, seed=5))
    return trainer


def sharp(model):
    """The same model with confidences far from zero."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40.0)
    return model


def plain_lora():
    torch.manual_seed(3)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(sharp(base_model()), config).eval()


@torch.no_grad()
def whole_distributions(model, data, samples):
    """Probabilities ``[n, N, V]`` of every draw and the labels ``[N]``, row by row."""
    by_draw, labels = [], []
    for k in range(len(data)):
        row = {name: torch.as_tensor(value)[None] for name, value in data[k].items()}
        seen = []
        if samples is None:
            seen.append(model(row["input_ids"]).logits.log_softmax(-1)[None])
        else:
            with posterior_predictive(model, samples, seed=5, observe=seen.append):
                model(row["input_ids"])
        wanted = row["labels"][0, 1:]
        by_draw.append(seen[0][:, 0, :-1][:, wanted != -100].double().exp())
        labels.append(wanted[wanted != -100])
    return torch.cat(by_draw, 1).numpy(), torch.cat(labels).numpy()


def expected(draws, labels):
    p = draws.mean(0)
    confidence, right = p.max(-1), p.argmax(-1) == labels
    ece = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            ece += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())

    def entropy(q):
        return -(q * np.log(q)).sum(-1)

    share = 1.0 - entropy(draws).mean() / entropy(p).mean()
    nll = -np.log(p[np.arange(len(labels)), labels]).mean()
    return {"eval_ece": ece, "eval_nll_draws": nll, "eval_epistemic_share": share}


@pytest.mark.parametrize("data", [Rows(7), Ragged(7)], ids=["all labels", "some labels"])
def test_figures_are_those_of_whole_distributions(tmp_path, monkeypatch, data):
    monkeypatch.setattr(batches, "CELLS", 2 * 6 * VOCABULARY)  # two rows at a time
    model = sharp(adapted())
    wanted = expected(*whole_distributions(model, data, 3))
    found = trainer_of(model, tmp_path, data).evaluate()
    assert {name: found[name] for name in NAMES} == pytest.approx(wanted, rel=1e-4)
    assert wanted["eval_ece"] > 0.05 and wanted["eval_epistemic_share"] > 1e-4


def test_a_plain_lora_predicts_as_it_is(tmp_path):
    model, data = plain_lora(), Rows(7)
    wanted = expected(*whole_distributions(model, data, None))
    found = trainer_of(model, tmp_path, data).evaluate()
    assert {name: found[name] for name in NAMES} == pytest.approx(wanted, rel=1e-4, abs=1e-7)
    assert found["eval_nll_draws"] == pytest.approx(found["eval_loss"], rel=1e-4)
    assert found["eval_epistemic_share"] == 0.0


def test_it_logs_at_every_evaluation_and_leaves_training_alone(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "learning_rate": 0.05}
    settings |= {"metric_for_best_model": "eval_nll_draws", "greater_is_better": False}

    def trained(with_callback):
        model = adapted()
        model.seed_draws(0)
        trainer = trainer_of(model, tmp_path, Rows(4), BayesLoraTrainer, **settings)
        if not with_callback:
            trainer.remove_callback(CalibrationCallback)
            trainer.args.metric_for_best_model = "eval_loss"
        trainer.train()
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}, trainer

    (ours, trainer), (theirs, _) = trained(True), trained(False)
    logged = [entry for entry in trainer.state.log_history if "eval_ece" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]
    assert all(set(entry) == NAMES | {"step", "epoch"} for entry in logged)
    assert trainer.state.best_metric == min(entry["eval_nll_draws"] for entry in logged)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_several_datasets_have_names(tmp_path):
    trainer = trainer_of(adapted(), tmp_path, {"near": Rows(2), "far": Ragged(3)})
    found = trainer.evaluate()
    assert {f"eval_{data}_{name}" for data in ("near", "far") for name in ("ece", "nll_draws")} <= set(found)
    assert found["eval_near_nll_draws"] != found["eval_far_nll_draws"]


def test_what_it_cannot_measure_is_refused(tmp_path):
    class Masked(Rows):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "labels": torch.full_like(self.ids[index], -100)}

    class Classes(Rows):
        def __getitem__(self, index):
            return {"input_ids": self.ids[index], "labels": 0}

    with pytest.raises(InputError, match="no label of the evaluation counts, all are -100; give an eval_dataset with"):
        trainer_of(adapted(), tmp_path, Masked(2)).evaluate()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    classifier = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes))
    with pytest.raises(InputError, match=r"labels have shape \(2,\) and input_ids \(2, 6\); leave it out"):
        trainer_of(classifier, tmp_path, Classes(2)).evaluate()
    tagger = BertForTokenClassification(BertConfig(vocab_size=VOCABULARY, num_labels=VOCABULARY, **sizes))
    with pytest.raises(InputError, match="needs a causal language model, which this model is not; leave it out"):
        trainer_of(tagger, tmp_path, Rows(2)).evaluate()
    with pytest.raises(InputError, match="samples is -1"):
        CalibrationCallback(None, samples=-1)
    with pytest.raises(InputError, match="bins is 0"):
        CalibrationCallback(None, bins=0)


@pytest.mark.system
def test_with_trl(tmp_path):
    trl = pytest.importorskip("trl")

    class Ours(BayesLoraTrainerMixin, trl.SFTTrainer):
        pass

    args = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=2, report_to=[], save_strategy="no", use_cpu=True, eval_strategy="steps",
        eval_steps=1, per_device_eval_batch_size=3, disable_tqdm=True, bf16=False, max_length=16,
    )  # fmt: skip
    ids = [row[: 3 + k % 4] for k, row in enumerate(Rows(7).ids.tolist())]
    rows = datasets.Dataset.from_dict({"input_ids": ids})
    trainer = Ours(
        adapted(target_modules=["q_proj", "k_proj"]),
        args=args,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer(),
    )
    trainer.add_callback(CalibrationCallback(trainer, samples=3, seed=5))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_ece" in entry]
    assert len(logged) == 2 and all(math.isfinite(value) for entry in logged for value in entry.values())
    data = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in ids]
    wanted = expected(*whole_distributions(trainer.model, data, 3))
    assert {name: logged[-1][name] for name in NAMES} == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_rows_at_once_fill_the_cells_and_no_more(tmp_path, monkeypatch):
    trainer, inputs = trainer_of(adapted(), tmp_path, Rows(4)), {"input_ids": torch.zeros(9, 6, dtype=torch.long)}
    for cells, rows in ((2 * 6 * VOCABULARY, 2), (3 * 6 * VOCABULARY - 1, 2), (5, 1)):
        monkeypatch.setattr(batches, "CELLS", cells)
        assert batches.rows_at_once(trainer, inputs) == rows


def _evaluated(rank, folder):
    found = trainer_of(sharp(adapted()), folder, Ragged(7), ddp_backend="gloo").evaluate()
    return {name: found[name] for name in NAMES}


@pytest.mark.system
def test_rows_count_once_on_two_processes(tmp_path, free_port):
    results = on_two_processes(_evaluated, tmp_path, free_port)
    alone = trainer_of(sharp(adapted()), tmp_path, Ragged(7)).evaluate()
    for found in results:
        assert found == pytest.approx({name: alone[name] for name in NAMES}, rel=1e-5)
