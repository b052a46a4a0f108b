"""Bayesian-LoRA with TRL: another ``SFTTrainer`` and another ``LoraConfig``, and the ELBO is trained."""

import tempfile

import torch
from datasets import Dataset
from trl import SFTConfig

from bayeslora import BayesLoraConfig, load_model
from bayeslora.train import BayesLoraSFTTrainer

loaded = load_model("smollm2")
data = Dataset.from_dict({"text": ["The urn holds a red ball.", "The bag holds a blue ball."] * 2})
with tempfile.TemporaryDirectory() as folder:
    trainer = BayesLoraSFTTrainer(
        loaded.model,
        args=SFTConfig(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=2,
            learning_rate=2e-4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),  # TRL's default, which is slow on many CPUs
            disable_tqdm=True,
            max_length=16,
        ),
        train_dataset=data,
        processing_class=loaded.tokenizer,
        peft_config=BayesLoraConfig(
            task_type="CAUSAL_LM", layers_to_transform=[29], target_modules=["q_proj", "v_proj"]
        ),
    )
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        print({name: value for name, value in entry.items() if "kl" in name or name in ("loss", "nll")})
    trainer.save_model(folder)  # loads with PeftModel.from_pretrained
