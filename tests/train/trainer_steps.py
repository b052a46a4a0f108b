"""Three steps of a ``BayesLoraTrainer``, as many processes as there are taking them together: what the parameters end as.

python -m train.trainer_steps OUT.safetensors [bf16]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, default_data_collator

from bayeslora import BayesLoraConfig
from bayeslora.train.trainer import BayesLoraTrainer

BATCH = 4


def make_trainer(folder: Path, bf16: bool) -> BayesLoraTrainer:
    """On a model whose weights and data are always the same."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config = BayesLoraConfig(posterior="inducing", task_type="CAUSAL_LM", target_modules=["q_proj"])
    model = get_peft_model(LlamaForCausalLM(shape), config)  # one draw, whatever the number of rows
    rows = torch.randint(64, (16, 12), generator=torch.Generator().manual_seed(1)).tolist()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=3,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=bf16,
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    return BayesLoraTrainer(model, arguments, train_dataset=data, data_collator=default_data_collator)


def change(trainer: BayesLoraTrainer) -> dict[str, torch.Tensor]:
    """By how much training has moved every parameter."""
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    trainer.train()
    return {name: (p.detach() - before[name]).contiguous() for name, p in parameters.items()}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    trainer = make_trainer(out.parent / "trainer", bf16="bf16" in sys.argv[2:])
    moved = change(trainer)
    if trainer.is_world_process_zero():
        save_file(moved, out)
