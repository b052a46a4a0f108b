"""Convert a GGUF file into an ordinary Hugging Face directory.

transformers can read GGUF files itself, but marks the model as quantised (it can then be neither trained nor saved) and
loses the pre-tokenizer of SmolLM2. So weights and tokenizer are rebuilt here from the file's own fields, and the
result is a plain directory for every tool: ``model.safetensors`` in float16 (see ``architecture``), the tokenizer and the
chat template.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from bayeslora.atomic_files import new_directory, tensor_failures
from bayeslora.errors import InputError
from bayeslora.models.architecture import Decoder, convert_weights
from bayeslora.models.gguf import read_gguf
from bayeslora.models.tokenizer import convert_tokenizer

CONVERTER_VERSION = 1
"""Part of the name of every cached conversion: increase it when the output changes."""

REQUIRED_FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
FILES = (*REQUIRED_FILES, "chat_template.jinja")
"""All files that may be written. ``force`` only replaces a directory that contains no others."""

Progress = Callable[[int, int], None]
"""Progress callback: number of tensors done, total number of tensors."""


def convert_gguf(source: Path, target: Path, *, force: bool = False, progress: Progress | None = None) -> None:
    """Write the model in the GGUF file ``source`` (SmolLM2 or Qwen2.5) as the Hugging Face directory ``target``.

    The directory is written atomically. Embedding and head are tied if the model was trained so.

    Args:
        source: the GGUF file.
        target: the directory to write; if it exists it must be empty.
        force: replace a directory that an earlier conversion wrote.
        progress: progress callback.

    Raises:
        InputError: the file cannot be converted, or the target may not be written.
    """
    source, target = Path(source), Path(target).resolve()
    _check_target(target, force)
    file = read_gguf(source)
    decoder = Decoder.from_gguf(file)
    tokenizer = convert_tokenizer(file, decoder.vocabulary)
    with new_directory(target, force=force) as directory, tensor_failures(target):
        weights, tied = convert_weights(file, decoder, progress or (lambda done, total: None))
        dtype = "float16" if all(w.dtype == np.float16 for w in weights.values()) else "float32"
        config = decoder.config(tied=tied, dtype=dtype, token_ids=tokenizer.token_ids)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        _write_json(directory / "config.json", config)
        _write_json(directory / "generation_config.json", dict(tokenizer.token_ids))
        tokenizer.write(directory, decoder.context)
        shutil.copymode(directory / "config.json", directory / "model.safetensors")  # safetensors makes it private


def _check_target(target: Path, force: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise InputError(f"{target}: exists and is not a directory; choose another one")
    present = {entry.name for entry in target.iterdir()}
    if present and not force:
        raise InputError(
            f"{target}: the directory is not empty; choose another one, or replace it with --force (force=True)"
        )
    foreign = sorted(present.difference(FILES))
    if foreign:
        raise InputError(f"{target}: holds {foreign[0]!r}, which no conversion wrote, so it is not replaced")


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
