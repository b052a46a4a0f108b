"""Losses from slices of tokens, against torch's cross-entropy of all logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from adapter.cases import adapted
from bayeslora import find_holder
from bayeslora.tasks import EncodedText
from bayeslora.train import head_loss
from bayeslora.train.head_loss import find_sliceable_head, head_input, sliced_cross_entropy
from bayeslora.train.objective import TokenObjective
from rounding import summed

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def problem(seed, rows=3, columns=7, width=5, words=11):
    source = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, columns, width, generator=source)
    targets = torch.randint(0, words, (rows, columns), generator=source)
    counted = (torch.rand(rows * columns, generator=source) < 0.6).nonzero().flatten()
    return states, targets, counted, torch.rand(len(counted), generator=source)


@pytest.mark.parametrize("cells", [1, 11 * 4, 2**20])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_losses_and_gradients_are_those_of_all_logits(monkeypatch, cells, smoothing, bias, frozen, seed):
    """Every token has a weight of its own in what is differentiated."""
    monkeypatch.setattr(head_loss, "CELLS", cells)
    torch.manual_seed(seed)
    head = nn.Linear(5, 11, bias=bias).requires_grad_(not frozen)
    states, targets, counted, weights = problem(seed)
    found = []
    for sliced in (True, False):
        given = states.clone().requires_grad_()
        if sliced:
            losses = sliced_cross_entropy(given, head, targets, counted, smoothing)
        else:
            logits, wanted = head(given).flatten(0, 1)[counted], targets.flatten()[counted]
            losses = F.cross_entropy(logits, wanted, reduction="none", label_smoothing=smoothing)
        wanted = [given, *(() if frozen else head.parameters())]
        found.append([losses, *torch.autograd.grad((losses * weights).sum(), wanted)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, **summed(want))


def test_half_precision_rounds_once():
    """As autograd does: logits and losses in float32, slopes in the precision of the weights."""
    head = nn.Linear(5, 11, bias=False).requires_grad_(False).to(torch.bfloat16)
    states, targets, counted, _ = problem(0)
    found = []
    for sliced in (True, False):
        given = states.to(torch.bfloat16).requires_grad_()
        if sliced:
            losses = sliced_cross_entropy(given, head, targets, counted)
        else:
            logits, wanted = head(given).flatten(0, 1)[counted], targets.flatten()[counted]
            losses = F.cross_entropy(logits.float(), wanted, reduction="none")
        assert losses.dtype == torch.float32
        found.append((losses, *torch.autograd.grad(losses.sum(), given)))
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2**-7, atol=2**-7)


class Largest(TorchDispatchMode):
    """The largest tensor that an operator returned."""

    def __init__(self, least):
        super().__init__()
        self.numel, self.least = 0, least

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for it in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(it, torch.Tensor) and it.shape[-1:] == (self.least,):
                self.numel = max(self.numel, it.numel())
        return made


@pytest.mark.parametrize("frozen", [False, True])
def test_the_logits_of_all_tokens_are_never_there(monkeypatch, frozen):
    monkeypatch.setattr(head_loss, "CELLS", 11 * 6)
    head = nn.Linear(5, 11).requires_grad_(not frozen)
    states, targets, counted, _ = problem(0)
    with Largest(11) as seen:
        sliced_cross_entropy(states.requires_grad_(), head, targets, counted).sum().backward()
    assert 0 < seen.numel <= 11 * 6


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["q_proj", "v_proj"]])
@pytest.mark.parametrize("draws", [1, 2])
def test_an_adapted_model_learns_the_same_either_way(monkeypatch, targets, draws):
    """Posterior and draws included, with texts of several lengths."""
    monkeypatch.setattr(head_loss, "CELLS", 300)
    texts = [EncodedText(f"t{k}", list(range(1, 3 + k)), list(range(5, 8 + 2 * k))) for k in range(4)]
    found = []
    for sliced in (True, False):
        model = adapted(posterior="meanfield", target_modules=targets).train()
        head = find_sliceable_head(model)
        assert head is model.get_output_embeddings()
        holder = find_holder(model)
        with holder.restoring():
            holder.draw(draws, torch.Generator().manual_seed(0))
            losses = TokenObjective(model, head=head if sliced else None).losses(texts, draws)
            losses.sum().backward()
        gradients = {name: p.grad for name, p in holder.named_parameters() if p.grad is not None}
        found.append({"losses": losses.detach(), **gradients})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 1
    for name, want in found[1].items():
        torch.testing.assert_close(found[0][name], want, **summed(want), msg=lambda m, n=name: f"{n}: {m}")


def test_the_head_is_given_nothing_and_is_whole_afterwards():
    model = adapted(posterior="meanfield").eval()
    head = model.get_output_embeddings()
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        states = head_input(model, ids, head)
        torch.testing.assert_close(head(states), model(input_ids=ids).logits)


@pytest.mark.parametrize(
    "model",
    [
        Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=5.0)),
        CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.5)),
        nn.Linear(3, 4),
    ],
    ids=lambda it: type(it).__name__,
)
def test_models_that_change_their_logits_are_told(model):
    assert find_sliceable_head(model) is None


def test_a_head_that_is_divided_among_processes_is_told():
    model = adapted(posterior="meanfield")
    head = model.get_output_embeddings()
    assert find_sliceable_head(model) is head
    head.weight.device_mesh = object()
    assert find_sliceable_head(model) is None


def test_looking_for_the_head_leaves_the_mode_and_the_random_state():
    model = adapted(posterior="meanfield", lora_dropout=0.5).train()
    before = torch.random.get_rng_state()
    assert find_sliceable_head(model) is not None
    assert model.training and torch.equal(torch.random.get_rng_state(), before)
