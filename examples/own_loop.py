"""Bayesian-LoRA in a training loop of your own: the ELBO in two lines, then text with its uncertainty."""

import torch
from peft import get_peft_model

from bayeslora import BayesLoraConfig, load_model
from bayeslora.predict.generation import Writing, generate

loaded = load_model("smollm2")
config = BayesLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
model = get_peft_model(loaded.model, config)
texts = ["The urn holds red and blue balls.", "A ball is drawn without looking.", "Nobody knows its colour before."]
batch = loaded.tokenizer(texts, return_tensors="pt", padding=True)
labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)

optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
for epoch in range(10):
    nll = model.train()(**batch, labels=labels).loss  # fresh draws of all weights: every text has its own
    model.elbo(nll, examples=len(texts), labels=labels).backward()  # with the KL at the same draws
    optimiser.step()
    optimiser.zero_grad()
    print(f"epoch {epoch + 1}: nll {nll.item():.3f}, KL of the means {model.kl()['mean'].item():.1f}")

(written,) = generate(model, loaded.tokenizer, ["The urn holds"], Writing(max_new_tokens=6), samples=4)
print(repr(written.text))
for token, p, doubt in zip(written.token_ids, written.probabilities, written.epistemic, strict=True):
    print(
        f"{loaded.tokenizer.decode([token])!r:12} probability {p:.3f}, of its uncertainty {doubt:.3f} nats from the weights"
    )
