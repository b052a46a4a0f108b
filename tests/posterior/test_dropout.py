"""MC-dropout: one mask per draw in evaluation, one per position in training, and the right mean in both."""

import pytest
import torch
import torch.nn.functional as F

from adapter.cases import adapted, base_model, generator, tokens
from bayeslora import find_holder
from bayeslora.posterior import DropoutConfig, DropoutPosterior, LayerShape
from rounding import summed

LAYERS = [LayerShape("q", 6, 40, rank=2), LayerShape("k", 6, 40, rank=2)]


def test_a_draw_drops_whole_input_features_and_keeps_the_mean():
    posterior = DropoutPosterior(LAYERS, DropoutConfig(p=0.3)).eval()
    point = posterior.mean()["q"].A
    with torch.no_grad():
        draws = posterior.draw(4000, torch.Generator().manual_seed(0))["q"].A
    dropped = (draws == 0).all(1)
    kept = (draws - point / 0.7).abs().amax(1) < 1e-6
    assert (dropped | kept).all()
    assert dropped.float().mean() == pytest.approx(0.3, abs=0.01)
    torch.testing.assert_close(draws.mean(0), point[0], atol=0.01, rtol=0.1)


def test_in_training_every_position_has_a_mask_of_its_own():
    posterior = DropoutPosterior(LAYERS, DropoutConfig(p=0.5))
    factors = posterior.draw(1)
    inner, (A, _) = factors.inner_by_layer()["q"], factors["q"]
    x = torch.ones(1, 3, 5, 40)
    torch.manual_seed(1)
    hidden = inner(x, A)
    torch.manual_seed(1)
    torch.testing.assert_close(hidden, F.dropout(x, 0.5) @ A.mT)
    assert len(hidden.flatten(0, 2).unique(dim=0)) == 15


@pytest.mark.parametrize("p", [0.0, 1.0, -0.1, float("nan")])
def test_a_bad_probability_is_refused(p):
    with pytest.raises(ValueError, match="p must lie between 0 and 1"):
        DropoutConfig(p=p)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_through_the_adapter_has_the_gradient_of_dropout(reentrant):
    """Against PEFT's LoRA with dropout at the same masks, with and without gradient checkpointing."""
    from peft import LoraConfig, get_peft_model

    ids = tokens()
    ours = adapted(posterior="dropout", settings={"p": 0.5}, target_modules=["q_proj"])
    theirs = get_peft_model(
        base_model(), LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.5, target_modules=["q_proj"])
    )
    mean = find_holder(ours).posterior("default").mean()
    with torch.no_grad():
        for name, module in theirs.base_model.model.named_modules():
            if name in mean:
                module.lora_A["default"].weight.copy_(mean[name].A[0])
                module.lora_B["default"].weight.copy_(mean[name].B[0])
    if reentrant is not None:
        ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for model in (ours, theirs):
        model.train()
        torch.manual_seed(3)
        model(input_ids=ids, labels=ids).loss.backward()
    gradients = {n: p.grad for n, p in find_holder(ours).posterior("default").named_parameters()}
    stacked = torch.stack(
        [m.lora_A["default"].weight.grad for n, m in theirs.base_model.model.named_modules() if n in mean]
    )
    ours_stacked = next(g for n, g in gradients.items() if n.startswith("A_"))
    torch.testing.assert_close(ours_stacked, stacked, **summed(stacked))


def test_folded_draws_equal_separate_ones_and_exported_adapters(tmp_path):
    from peft import PeftModel

    model = adapted(posterior="dropout", settings={"p": 0.5}).eval()
    ids = tokens()
    with torch.no_grad():
        with model.draws(3, generator(1)):
            folded = model(ids.repeat(3, 1)).logits.unflatten(0, (3, -1))
        model.train()  # exporting draws whole networks all the same
        directories = model.export_samples(3, tmp_path / "out", generator(1))
        for k, directory in enumerate(directories[1:]):
            stock = PeftModel.from_pretrained(base_model(), str(directory)).eval()
            torch.testing.assert_close(stock(ids).logits, folded[k], atol=1e-5, rtol=1e-4)
