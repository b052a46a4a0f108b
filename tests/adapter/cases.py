"""Tiny random models of four architectures, and how the tests adapt them."""

import copy
import functools
import warnings

import torch
from peft import get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bayeslora import BayesLoraConfig

VOCABULARY = 61
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}


def _llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def _qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True))


def _qwen3_moe():
    config = Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return Qwen3MoeForCausalLM(config)


def _gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=64,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    )


MODELS = {"llama": _llama, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "gpt2": _gpt2}
TARGETS = {"gpt2": ["c_attn", "lm_head"]}
TIED = ["qwen3", "gpt2"]


@functools.cache
def _built(architecture):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[architecture]().eval()


def base_model(architecture="llama"):
    """The same weights at every call."""
    return copy.deepcopy(_built(architecture))


def config(architecture="llama", **settings):
    given = {
        "posterior": "inducing",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "init_weights": False,
        **settings,
    }
    given.setdefault("target_modules", TARGETS.get(architecture, ["q_proj", "k_proj", "lm_head"]))
    return BayesLoraConfig(**given)


def adapted(architecture="llama", **settings):
    """A model in evaluation mode whose adapter does something."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(base_model(architecture), config(architecture, **settings)).eval()


def tokens(batch=4, length=6, seed=0):
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids=None, **kwargs):
    return model(tokens() if ids is None else ids, **kwargs).logits


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def foreign_model(kind, settings=None, architecture="llama", seed=0, **changes):
    """A tiny model with an adapter of PEFT's own, of a holder's class."""
    site = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"], "layers": None, "seed": seed} | changes
    return kind.adapt(base_model(architecture), kind.peft_config(settings or {}, **site), seed)
