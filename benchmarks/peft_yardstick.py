"""PEFT's own tests of LoRA, run against our method: ``python benchmarks/peft_yardstick.py``.

Downloads the source archive of the installed PEFT and runs its suites for custom models and for decoders twice: as they are,
and with our configuration in place of ``LoraConfig`` (``benchmarks/peft_stand_in.py``). Written is how many of the tests that
LoRA passes ours passes too, and which it does not. Models of the hub are replaced by tiny ones with random weights, under the
same names. Nothing of PEFT's is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

HERE = Path(__file__).parent
RESULT = HERE / "results" / "peft_yardstick.json"
SUITES = ("tests/test_custom_models.py", "tests/test_decoder_models.py")
SIZES: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
}
GPT: Mapping[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 1024, "n_positions": 128}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": ("gemma3_text", {**SIZES, "head_dim": 8}),
    "hf-internal-testing/tiny-random-MistralForCausalLM": ("mistral", SIZES),
    "hf-internal-testing/tiny-random-gpt2": ("gpt2", GPT),
    "peft-internal-testing/tiny-dummy-qwen2": ("qwen2", SIZES),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("gpt2", GPT),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": ("gptj", {**GPT, "rotary_dim": 4}),
    "peft-internal-testing/tiny-random-OPTForCausalLM": ("opt", {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16}),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("llama", SIZES),
}
"""The suites' models: their types and sizes."""


def prepare(folder: Path) -> None:
    """The suites, with models where they look for them."""
    package = f"peft=={peft.__version__}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", package]
    subprocess.run([*pip, "--dest", str(folder)], check=True, stderr=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob("peft-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    next(folder.glob("peft-*/tests")).rename(folder / "tests")
    (folder / "tests" / "__init__.py").touch()
    shutil.copy(HERE / "peft_stand_in.py", folder / "conftest.py")
    for name, (kind, sizes) in MODELS.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **sizes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)


def run(folder: Path, method: str) -> dict[str, str]:
    """What became of every test: ``passed``, ``failed``, ``skipped``, or ``not offered:`` and what."""
    report = folder / f"{method}.xml"
    options = ["-q", "-W", "ignore", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *SUITES, *options]
    environment = {**os.environ, "PEFT_YARDSTICK": method, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False, timeout=3600)
    return dict(map(_outcome, ElementTree.parse(report).iter("testcase")))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    if case.find("failure") is not None or case.find("error") is not None:
        return name, "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return name, "passed"
    message = skipped.get("message", "")
    return name, message if message.startswith("not offered") else "skipped"


def compare(lora: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, Any]:
    """How ours does where LoRA passes. The share is that of the tests that ask for nothing that is not offered."""
    there = {name: ours.get(name, "missing") for name, outcome in lora.items() if outcome == "passed"}
    asked = [outcome.partition(": ") for outcome in there.values()]
    counts = Counter(outcome for outcome, _, _ in asked)
    failed = sorted(name for name, outcome in there.items() if outcome in ("failed", "missing"))
    return {
        "lora": dict(Counter(lora.values())),
        "ours_where_lora_passes": dict(counts),
        "share": round(counts["passed"] / (counts["passed"] + len(failed)), 4),
        "failed_by_test": dict(Counter(name.partition("[")[0].partition("::")[2] for name in failed)),
        "not_offered": dict(Counter(what for _, _, what in asked if what).most_common()),
        "failed": failed,
    }


def main() -> None:
    """Run the suites and write the result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        result = {
            "command": "python benchmarks/peft_yardstick.py",
            "versions": {
                "peft": peft.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            **compare(run(folder, "lora"), run(folder, "ours")),
        }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["ours_where_lora_passes"]), "written to", RESULT)


if __name__ == "__main__":
    main()
