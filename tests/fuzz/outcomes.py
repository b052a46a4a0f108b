"""What a fuzzed command may do: succeed, or say in one line why not."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from hypothesis import HealthCheck, settings

from train.tiny import bayeslora

CASES = int(os.environ.get("FUZZ", "12"))
"""Cases of every test; ``FUZZ=2000 make fuzz`` for thousands."""

fuzzed = settings(
    max_examples=CASES,
    deadline=None,
    derandomize="FUZZ" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def run(*words: object) -> tuple[int, str]:
    """The exit code and what was printed on stderr. An exception that gets out of the command line fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = bayeslora(*words)
    return code, err.getvalue()


def require_clear(code: int, err: str) -> None:
    """Success, or a line that says what is wrong."""
    if code == 0:
        return
    assert code in (1, 2), code
    lines = [line for line in err.splitlines() if line.startswith("bayeslora: ")]
    assert lines and len(lines[-1]) > len("bayeslora: ") + 10, err
    assert "Traceback" not in err


def names(directory: Path) -> set[str]:
    """All names below a directory."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}
