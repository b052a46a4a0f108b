"""Device and precision of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bayeslora.errors import InputError

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda", "cuda:N", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def resolve_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is CUDA, else Apple's MPS, else the CPU."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise InputError(f"unknown device {name!r}; choose one of {', '.join(DEVICES)}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise InputError("device 'mps' is not available here; use 'cpu' or 'auto'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {name!r} is not available: torch sees {torch.cuda.device_count()} of them; use 'cpu' or 'auto'"
        )
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of this name; ``auto`` is bfloat16 where CUDA has it in hardware and float32 elsewhere.

    On a CPU bfloat16 is many times slower than float32, and float16 overflows in training without loss scaling.
    """
    import torch

    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32
