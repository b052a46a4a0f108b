"""What makes a single prediction start and end sooner, and that nothing else changes by it."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bayeslora.cli.collector import collector_paused
from bayeslora.cli.lazy_library import import_lazily
from train import tiny
from train.tiny import bayeslora

# A library that is loaded when it is used ------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that notes when its code runs, and fails as often as it is told to."""
    name = f"seldom_used_{tmp_path.name}".replace("-", "_")
    package = tmp_path / "site" / name
    package.mkdir(parents=True)
    (package / "part.py").write_text("number = 3\n")
    (package / "__init__.py").write_text(
        "from pathlib import Path\n"
        "log = Path(__file__).with_name('log')\n"
        "log.write_text(log.read_text() + 'run ' if log.exists() else 'run ')\n"
        "fail = log.with_name('fail')\n"
        "if fail.exists():\n    fail.unlink()\n    raise AttributeError('not yet')\n"
        "from . import part\n"
        "twice = 2 * part.number\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    before = set(sys.modules)
    yield name
    for added in set(sys.modules) - before:
        if added.partition(".")[0] == name:
            del sys.modules[added]


def runs(name: str) -> str:
    log = Path(importlib.util.find_spec(name).origin).with_name("log")  # type: ignore[union-attr, arg-type]
    return log.read_text() if log.exists() else ""


def test_a_lazy_library_runs_at_its_first_use(library: str) -> None:
    import_lazily(library)
    module = importlib.import_module(library)
    assert isinstance(module, ModuleType) and module.__name__ == library
    assert module.__file__.endswith("__init__.py") and module.__spec__.name == library
    assert importlib.util.find_spec(library) is module.__spec__ and not runs(library)
    inspect.getmodule(inspect.currentframe(), "no such file")  # looks at all modules
    assert not runs(library) and f"{library}.part" not in sys.modules
    assert module.twice == 6 and module.part.number == 3 and runs(library) == "run "
    assert type(module) is ModuleType and importlib.import_module(library) is module
    with pytest.raises(AttributeError, match="thrice"):
        _ = module.thrice
    assert runs(library) == "run "


def test_a_lazy_library_runs_before_its_parts(library: str) -> None:
    import_lazily(library)
    assert importlib.import_module(f"{library}.part").number == 3
    assert runs(library) == "run " and sys.modules[library].twice == 6


def test_a_lazy_library_that_fails_is_tried_again(library: str) -> None:
    import_lazily(library)
    module = importlib.import_module(library)
    Path(module.__file__).with_name("fail").touch()
    assert not hasattr(module, "twice")
    assert module.twice == 6 and runs(library) == "run run "


def test_a_library_that_is_loaded_or_missing_stays_so(library: str) -> None:
    module = importlib.import_module(library)
    import_lazily(library)
    assert sys.modules[library] is module and runs(library) == "run "
    import_lazily("no_such_library")
    assert "no_such_library" not in sys.modules


# The garbage collector -------------------------------------------------------------------------------------------------


def test_the_collector_rests_inside_the_block_only() -> None:
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        _ = 1 / 0
    assert gc.isenabled()


def test_the_collector_passes_over_everything_at_the_end() -> None:
    code = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 1000))  # runs last
from bayeslora.cli.collector import spare_collector_at_exit
before = gc.get_freeze_count()  # Python 3.12 starts with some
spare_collector_at_exit()
spare_collector_at_exit()
print(gc.get_freeze_count() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "True"]


# A prediction ----------------------------------------------------------------------------------------------------------

ASKED = ["--question", "Is 4 even?", "--choice", "yes", "--choice", "no", "--json", "--quiet", "--device", "cpu"]

ALONE = """
import sys
from bayeslora.cli import main
try: main(sys.argv[2:])
except SystemExit as end: assert not end.code
loaded = {"bitsandbytes.nn", "torch._inductor.compile_fx", "datasets", "pandas", "matplotlib"}
assert not loaded & sys.modules.keys(), loaded & sys.modules.keys()

import importlib.util
if importlib.util.find_spec("bitsandbytes") is not None:  # can still be used
    from bayeslora import load_model
    layer = load_model(sys.argv[1], bits=8, device="cpu").model.model.layers[0].self_attn.q_proj
    assert type(layer).__name__ == "Linear8bitLt" and "bitsandbytes.nn" in sys.modules, layer
"""


@pytest.mark.system
def test_a_prediction_imports_what_it_needs_and_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, in which a quantised model can be loaded later."""
    words = ["predict", str(tiny.finished()), *ASKED]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, tiny.model_directory(), *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert bayeslora(*words) == 0
    assert json.loads(done.stdout) == json.loads(capsys.readouterr().out)
    assert gc.isenabled()
