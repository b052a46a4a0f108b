"""A posterior on a real language model: attach it, take one training step, and see how far its draws disagree."""

import torch
from peft import get_peft_model

from bayeslora import BayesLoraConfig, load_model

loaded = load_model("smollm2")
config = BayesLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj"], layers_to_transform=[28, 29])
model = get_peft_model(loaded.model, config)
model.print_trainable_parameters()

example = loaded.tokenizer(["The capital of France is Paris."] * 4, return_tensors="pt")
optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2, weight_decay=0.0)
likelihood = model.train()(**example, labels=example["input_ids"]).loss  # four draws, one for each row
model.elbo(likelihood, examples=1000, labels=example["input_ids"]).backward()  # as if there were 1000 such examples
optimiser.step()

prompt = loaded.tokenizer("The capital of France is", return_tensors="pt")
with torch.no_grad(), model.eval().draws(4):  # the batch is four blocks, one for each draw
    logits = model(input_ids=prompt["input_ids"].repeat(4, 1)).logits[:, -1]
draws = logits.softmax(-1)
for token in draws.mean(0).topk(3).indices:
    spread = ", ".join(f"{p:.3f}" for p in draws[:, token])
    print(f"{loaded.tokenizer.decode(token)!r:10} mean {draws[:, token].mean():.3f}   draws {spread}")
