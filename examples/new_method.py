"""A method of one's own: a posterior of ten lines, registered, and in a model like every other.

CONTRIBUTING.md walks through it.
"""

from dataclasses import dataclass, replace

import torch
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from bayeslora import BayesLoraConfig
from bayeslora.methods import METHODS, lora
from bayeslora.methods.base import Method
from bayeslora.posterior import POSTERIORS, PointPosterior


@dataclass(frozen=True)
class JitterConfig:
    """How wide the noise is."""

    sd: float = 0.05


class JitterPosterior(PointPosterior):
    """LoRA with noise of a fixed width on its factor B, in training and in prediction."""

    name = "jitter"
    config_class = JitterConfig
    spread = "width"

    def _draw(self, n, source):
        point = self._points(n)
        return replace(point, B=tuple(b + self.scale * self.config.sd * source.normal(b.shape) for b in point.B))


POSTERIORS["jitter"] = JitterPosterior
METHODS["jitter"] = Method(
    name="jitter",
    description="LoRA with noise of a fixed width on its factor B",
    posterior=JitterPosterior,
    presets=lora.METHOD.presets,
)

if __name__ == "__main__":
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
    )
    model = get_peft_model(base, BayesLoraConfig(posterior="jitter", settings={"sd": 0.1}, r=4)).eval()
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad(), model.draws(4, torch.Generator().manual_seed(0)):
        draws = model(ids.repeat(4, 1)).logits[:, -1].softmax(-1)
    with torch.no_grad():
        mean = model(ids).logits[:, -1].softmax(-1)
    print(f"four draws differ by {(draws - draws.mean(0)).abs().max():.4f}; the mean is LoRA's: {mean.max():.4f}")
    print(f"bayeslora train --method {METHODS['jitter'].name}: {METHODS['jitter'].description}")
