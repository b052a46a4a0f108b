"""Environment of a result: versions, device, commit, memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import bayeslora

PACKAGES = ("torch", "transformers", "peft", "accelerate", "numpy", "safetensors")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, machine and device."""
    return {
        "bayeslora": bayeslora.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of tensors on a CUDA device, of the whole process elsewhere."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak_memory() -> None:
    """Reset :func:`peak_memory` of CUDA devices; that of a process cannot be reset."""
    if torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)


def _commit() -> str | None:
    """The commit of the package's source, marked if the source has changed since; ``None`` for an installed package.

    ``BAYESLORA_COMMIT`` may name it where the source has no repository, such as in a container.
    """
    if given := os.environ.get("BAYESLORA_COMMIT"):
        return given
    source = Path(__file__).resolve().parents[3]
    if not (source / ".git").exists():
        return None
    try:
        commit = _git(source, "rev-parse", "HEAD")
        return f"{commit}+changes" if _git(source, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None


def _git(source: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
