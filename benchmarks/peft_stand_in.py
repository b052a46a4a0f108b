"""What puts our configuration in place of ``LoraConfig`` in PEFT's suites; ``peft_yardstick.py`` makes it their ``conftest.py``.

With ``PEFT_YARDSTICK=lora`` the same tests are run as they are. Left out are tests of other methods and of LoRA's own insides.
Where a test asks for what is documented as not offered, it is skipped and says so.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import types
from typing import Any

import peft
import pytest

import bayeslora.adapter

diffusers: Any = types.ModuleType("diffusers")  # the suites import it, these tests do not use it
diffusers.StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})
sys.modules.setdefault("diffusers", diffusers)

NOT_OFFERED = re.compile(
    r"unexpected keyword argument '(\w+)'"
    r"|\((\w+)\) is not supported: bayeslora adapts"
    r"|(target_parameters|lora_bias|bias|use_dora|layer_replication)=.* is not supported"
    r"|no attribute '(add_weighted_adapter)'"
    r"|not compatible with the `(PeftMixedModel)`"
)
"""How it is told that something is not offered, and what: options of LoRA's, layers, sums of adapters, PEFT's mixed models."""
INSIDES = re.compile(r"lora_[AB]|lora\.|LoraLayer|_register_custom_module|layer_replication|DoRA")
"""What only tests of LoRA's insides name."""


class StandIn(bayeslora.adapter.BayesLoraConfig):
    """Ours, by LoRA's names."""

    def __init__(self, *args: Any, init_lora_weights: Any = True, **settings: Any) -> None:
        if not isinstance(init_lora_weights, bool):
            pytest.skip("not offered: init_lora_weights")
        settings.setdefault("init_weights", init_lora_weights)
        try:
            super().__init__(*args, **settings)
        except TypeError as error:  # some tests take it for a reason of their own to be skipped
            _skip_if_not_offered(error)
            raise


StandIn.__name__ = "LoraConfig"  # so that tests have the same names
LORA = peft.LoraConfig
if os.environ["PEFT_YARDSTICK"] == "ours":
    peft.LoraConfig = LORA = StandIn


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Keep what is about LoRA."""
    items[:] = [item for item in items if _about_lora(item)]


def _about_lora(item: pytest.Function) -> bool:
    source = inspect.getsource(item.function)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    configs = [value for value in params.values() if isinstance(value, (type, peft.PeftConfig))]
    configs = [value for value in configs if not isinstance(value, type) or issubclass(value, peft.PeftConfig)]
    if configs:
        return all(value is LORA or type(value) is LORA for value in configs)
    return "LoraConfig(" in source and not INSIDES.search(source)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Any:
    """Tell what is not offered from what fails."""
    try:
        return (yield)
    except Exception as error:
        _skip_if_not_offered(error)
        raise


def _skip_if_not_offered(error: Exception) -> None:
    if found := NOT_OFFERED.search(str(error)):
        pytest.skip(f"not offered: {found[found.lastindex or 0]}")
