"""Damaged files: every one is converted or refused, quickly and without asking for much memory."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bayeslora.errors import InputError
from bayeslora.models import convert_gguf
from bayeslora.models.gguf import read_gguf

from .ggufs import Recipe, tiny_model

pytestmark = pytest.mark.system

COMMON = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    return Recipe(matrix_type=Type.Q8_0).write(tiny_model("llama"), path).read_bytes()


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """At most 1 GB more address space than now, so that an absurd allocation fails."""
    if sys.platform != "linux":
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _convert_or_refuse(content: bytes, folder: Path) -> None:
    source, target = folder / "m.gguf", folder / "out"
    source.write_bytes(content)
    shutil.rmtree(target, ignore_errors=True)
    with contextlib.suppress(InputError):
        convert_gguf(source, target)


def test_the_intact_file_is_fine(intact: bytes, tmp_path: Path) -> None:
    _convert_or_refuse(intact, tmp_path)
    assert (tmp_path / "out" / "config.json").is_file()


@given(data=st.data())
@settings(COMMON, max_examples=300)
def test_flipped_bits(intact: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(intact)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(intact) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    _convert_or_refuse(bytes(damaged), tmp_path)


@given(position=st.integers(0, 12_000), value=st.binary(min_size=1, max_size=8))
@settings(COMMON, max_examples=200)
def test_overwritten_header_bytes(intact: bytes, tmp_path: Path, position: int, value: bytes) -> None:
    _convert_or_refuse(intact[:position] + value + intact[position + len(value) :], tmp_path)


@given(data=st.data())
@settings(COMMON, max_examples=200)
def test_truncated_files_are_refused(intact: bytes, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(intact[: data.draw(st.integers(0, len(intact) - 33))])
    with pytest.raises(InputError):
        read_gguf(path)
