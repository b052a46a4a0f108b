"""What training goes on from beside parameters and optimiser, in a checkpoint of transformers' ``Trainer``.

An adapter's file has what a prediction needs. Training also needs buffers that are not saved with the adapter, such as
AdaLoRA's statistics and mask, and the state of the generator that ``seed_draws`` has set.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from bayeslora.adapter.holder import PosteriorHolder
from bayeslora.atomic_files import replacing, tensor_failures

FILE = "bayeslora_training.safetensors"
GENERATOR = "generator"


def save_unsaved_state(holder: PosteriorHolder, checkpoint: Path) -> None:
    """Write it into the directory of a checkpoint; nothing if there is none."""
    tensors = {f"buffer.{name}": value.detach().cpu().contiguous() for name, value in _unsaved_buffers(holder).items()}
    if holder.generator is not None:
        tensors[GENERATOR] = holder.generator.get_state()
    if tensors:
        checkpoint.mkdir(parents=True, exist_ok=True)
        with tensor_failures(checkpoint / FILE), replacing(checkpoint / FILE) as partial:
            save_file(tensors, partial)


def load_unsaved_state(holder: PosteriorHolder, checkpoint: Path) -> None:
    """Restore it from a checkpoint; one without it, which an earlier version has written, changes nothing."""
    if not (checkpoint / FILE).exists():
        return
    tensors = load_file(checkpoint / FILE)
    for name, buffer in _unsaved_buffers(holder).items():
        buffer.copy_(tensors[f"buffer.{name}"])
    if holder.generator is not None and GENERATOR in tensors:
        holder.generator.set_state(tensors[GENERATOR])


def _unsaved_buffers(holder: PosteriorHolder) -> dict[str, Tensor]:
    saved = holder.state_dict().keys()
    return {name: buffer for name, buffer in holder.named_buffers() if name not in saved}
