"""Adapters in the first version of FSDP, which puts plain tensors in the place of parameters while a model computes."""

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from adapter.cases import base_model, config, logits
from bayeslora.posterior.registry import POSTERIORS


@pytest.fixture(scope="module")
def one_process():
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("needs torch.distributed, and no group of processes yet")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("posterior", POSTERIORS)
def test_a_wrapped_model_answers_and_is_saved(posterior):
    settings = {"posterior": posterior, "target_modules": ["q_proj", "k_proj"]}
    plain = get_peft_model(base_model(), config(**settings)).eval()
    wrapped = FullyShardedDataParallel(
        get_peft_model(base_model(), config(**settings)).eval(), use_orig_params=True, device_id=torch.device("cpu")
    )
    expected = logits(plain)
    torch.testing.assert_close(logits(wrapped), expected, atol=1e-6, rtol=1e-5)
    state = get_peft_model_state_dict(wrapped)
    fresh = get_peft_model(base_model(), config(**settings, seed=9)).eval()
    assert not torch.equal(logits(fresh), expected)
    set_peft_model_state_dict(fresh, state)
    torch.testing.assert_close(logits(fresh), expected, atol=1e-6, rtol=1e-5)
