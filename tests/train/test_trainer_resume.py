"""Training in transformers' ``Trainer`` that goes on from a checkpoint ends where it would have ended without a pause."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments, default_data_collator

from adapter.cases import adapted, tokens
from bayeslora.adapter.holder import find_holder
from bayeslora.train.component_callback import ReplaceFailedComponents
from bayeslora.train.trainer import BayesLoraTrainer
from bayeslora.train.unsaved_state import FILE

ROWS = [{"input_ids": row, "labels": row} for row in tokens(batch=24, seed=1)]


def trained(folder: Path, posterior: str, seeded: bool, resume: Path | None = None, **given: object) -> torch.nn.Module:
    """A model after two epochs of six steps, with a checkpoint after the fourth and the eighth; or gone on from one."""
    model = adapted(posterior=posterior)
    if seeded:
        model.seed_draws(5)
    told = {"num_train_epochs": 2, "learning_rate": 1e-2, "save_steps": 4, "report_to": [], "use_cpu": True, **given}
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=4, disable_tqdm=True, **told)
    trainer = BayesLoraTrainer(model, arguments, train_dataset=ROWS, data_collator=default_data_collator)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return model


@pytest.mark.parametrize(
    ("posterior", "seeded", "step"),
    [("adalora", False, 8), ("meanfield", True, 8), ("meanfield", True, 4), ("decoupled", False, 8)],
)
def test_it_ends_where_it_would_have_ended(tmp_path: Path, posterior: str, seeded: bool, step: int) -> None:
    whole = trained(tmp_path / "whole", posterior, seeded)
    checkpoint = tmp_path / f"whole/checkpoint-{step}"
    assert (checkpoint / FILE).exists() == (posterior == "adalora" or seeded)
    resumed = trained(tmp_path / "resumed", posterior, seeded, checkpoint)
    for name, value in find_holder(whole).named_parameters():
        assert torch.equal(value, find_holder(resumed).get_parameter(name)), name


def test_a_component_that_is_replaced_at_the_end_of_an_epoch_is_saved_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first epoch, after six steps."""

    def losses(self: ReplaceFailedComponents, components: int, seed: int) -> list[float]:
        return [4.0, 9.0 if seed == 6 else 1.0] + [1.0] * (components - 1)  # of the base model, and of each component

    monkeypatch.setattr(ReplaceFailedComponents, "_losses", losses)
    given = {"save_steps": 6, "posterior": "decoupled", "seeded": False}
    whole = trained(tmp_path / "whole", **given)
    resumed = trained(tmp_path / "resumed", **given, resume=tmp_path / "whole/checkpoint-6")
    for name, value in find_holder(whole).named_parameters():
        assert torch.equal(value, find_holder(resumed).get_parameter(name)), name


def test_a_mask_is_restored_though_batches_are_not_skipped(tmp_path: Path) -> None:
    """With the data in another order the weights differ; the rank that is left does not."""
    whole = trained(tmp_path / "whole", "adalora", False)
    resumed = trained(tmp_path / "on", "adalora", False, tmp_path / "whole/checkpoint-8", ignore_data_skip=True)
    ranks = [
        sum(int(value.count_nonzero()) for name, value in find_holder(model).named_parameters() if ".E_" in name)
        for model in (whole, resumed)
    ]
    assert ranks[0] == ranks[1] > 0


def test_a_checkpoint_of_an_earlier_version_can_be_gone_on_from(tmp_path: Path) -> None:
    trained(tmp_path / "whole", "adalora", False)
    (tmp_path / "whole/checkpoint-8" / FILE).unlink()
    trained(tmp_path / "resumed", "adalora", False, tmp_path / "whole/checkpoint-8")
