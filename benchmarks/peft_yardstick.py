"""PEFT's own test-suite for custom models, run against our method: ``python benchmarks/peft_yardstick.py``.

Downloads the source archive of the installed PEFT, puts ten configurations of ours into the suite's table in place of its
own, runs the class ``TestPeftCustomModel`` and writes how many tests passed and which did not. Nothing of PEFT's is kept.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

import peft
import torch
import transformers

RESULT = Path(__file__).parent / "results" / "peft_yardstick.json"
CASES = """
from bayeslora import BayesLoraConfig
TEST_CASES = [
    ("Ours 1", "MLP", BayesLoraConfig, {"target_modules": "lin0"}),
    ("Ours 2", "MLP", BayesLoraConfig, {"target_modules": ["lin0"]}),
    ("Ours 3", "MLP", BayesLoraConfig, {"target_modules": ["lin1"]}),
    ("Ours 4", "MLP", BayesLoraConfig, {"target_modules": ["lin0", "lin1"]}),
    ("Ours 5", "MLP", BayesLoraConfig, {"target_modules": ["lin0"], "modules_to_save": ["lin1"]}),
    ("Ours 6", "MLP", BayesLoraConfig, {"target_modules": ["lin0"], "lora_alpha": 4, "r": 4}),
    ("Ours rslora", "MLP", BayesLoraConfig, {"target_modules": ["lin0"], "use_rslora": True}),
    ("Ours point", "MLP", BayesLoraConfig, {"target_modules": ["lin0"], "posterior": "point"}),
    ("Ours ensemble", "MLP", BayesLoraConfig, {"target_modules": ["lin0"], "posterior": "ensemble"}),
    ("Ours Conv1D", "EmbConv1D", BayesLoraConfig, {"target_modules": ["conv1d"]}),
]
"""
CONFTEST = """
import sys, types
diffusers = types.ModuleType("diffusers")  # the suite imports it, these tests do not use it
diffusers.StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})
sys.modules.setdefault("diffusers", diffusers)
import bayeslora
"""


def prepare(folder: Path) -> None:
    """The suite with our table in it."""
    package = f"peft=={peft.__version__}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", package]
    subprocess.run([*pip, "--dest", str(folder)], check=True, stderr=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob("peft-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    tests = next(folder.glob("peft-*/tests"))
    tests.rename(folder / "tests")
    (folder / "tests" / "__init__.py").touch()
    (folder / "conftest.py").write_text(CONFTEST)
    suite = folder / "tests" / "test_custom_models.py"
    mark = "\nMULTIPLE_ACTIVE_ADAPTERS_TEST_CASES"
    suite.write_text(suite.read_text().replace(mark, CASES + mark, 1))


def run(folder: Path) -> str:
    """pytest's summary."""
    options = ["-q", "-W", "ignore", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-k", "TestPeftCustomModel and Ours"]
    command = [sys.executable, "-m", "pytest", "tests/test_custom_models.py", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=1800).stdout


def main() -> None:
    """Run the suite and write the result."""
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        output = run(Path(name))
    failed = re.findall(r"^FAILED \S+::(\w+)\[(Ours [^-]+)-[^\]]*\](?: - (\w+))?", output, re.M)
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped)", output.splitlines()[-1])}
    result = {
        "command": "python benchmarks/peft_yardstick.py",
        "versions": {"peft": peft.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "counts": counts,
        "failed_by_test": dict(Counter(test for test, _, _ in failed)),
        "failed": [f"{test} [{case}]" for test, case, _ in failed],
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["counts"]), "written to", RESULT)


if __name__ == "__main__":
    main()
