"""Fixtures of the tests of the tasks."""

from __future__ import annotations

from typing import Any

import pytest

from bayeslora.models.smollm2 import INSTALL, find_smollm2, smollm2_directory


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real tokenizer of SmolLM2."""
    if find_smollm2() is None:
        pytest.skip(f"the model is not installed: {INSTALL}")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_directory())
