"""Load a causal language model and its tokenizer: a built-in one, a local directory, or a model of the hub.

Invalid user input raises :class:`~bayeslora.errors.InputError` as early as possible: names are checked first, then the
config, then the tokenizer, and the weights last. transformers and torch are imported only when a model is loaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bayeslora.errors import InputError, first_line, out_of_memory
from bayeslora.hub_access import hub_or_cache
from bayeslora.models.device import resolve_device, resolve_dtype
from bayeslora.models.failures import damaged_weights, hub_failure, remote_code_failure
from bayeslora.models.finite import require_finite_weights
from bayeslora.models.four_bit import warn_of_wrong_rows
from bayeslora.models.locate import locate, portable_name

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with its tokenizer, and the name it was loaded by."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return (
            f"LoadedModel({self.name!r}, {count / 1e6:.1f} million parameters, {self.model.dtype}, {self.model.device})"
        )


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    bits: Literal[4, 8] | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> LoadedModel:
    """Load a causal language model with its tokenizer. Only safetensors weights are read.

    A tokenizer without a pad token, or with one that the model does not know, gets the end token as one; its padding side is
    unchanged.

    Args:
        name: ``smollm2``, a directory (``./smollm2`` if it has a built-in's name), or a hub id such as ``org/model``.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``. ``auto`` is bfloat16 on CUDA devices that have it and
            float32 elsewhere.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``. ``auto`` takes the first of CUDA, MPS and CPU.
        bits: quantise the weights while loading, to NF4 (4) or LLM.int8 (8); needs bitsandbytes.
        attention: attention implementation of transformers, such as ``sdpa`` or ``eager``; by default its own choice.
        trust_remote_code: run code from the model's repository.
        revision: branch, tag or commit of a hub model.

    Raises:
        InputError: the model cannot be loaded as asked; the message says why and what to do.
    """
    place = resolve_device(device)
    precision = resolve_dtype(dtype, place)
    quantization = _quantization(bits, precision)
    directory = locate(name, revision)
    request = _Request(name, directory, revision, trust_remote_code, place, precision, quantization, attention)
    with request.access, _quiet_transformers():
        config = _load_config(request)
        tokenizer = _load_tokenizer(request)
        model = _load_weights(request, config)
    embedding: Any = model.get_input_embeddings()
    if tokenizer.pad_token_id >= embedding.weight.shape[0]:
        _pad_with_end(tokenizer, name)
    require_finite_weights(model, name)
    warn_of_wrong_rows(model)
    local = None if directory is None else str(directory.resolve())
    model.config._name_or_path = portable_name(name) or local or model.config._name_or_path
    return LoadedModel(model, tokenizer, name)


def load_empty(name: str, precision: torch.dtype, revision: str | None = None) -> LoadedModel:
    """A model without its weights, on torch's ``meta`` device, with its tokenizer; remote code is not run."""
    import torch
    from transformers import AutoModelForCausalLM

    request = _Request(name, locate(name, revision), revision, False, torch.device("meta"), precision, None, None)
    with request.access, _quiet_transformers():
        config, tokenizer = _load_config(request), _load_tokenizer(request)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=precision)
    return LoadedModel(model.requires_grad_(False), tokenizer, name)


def load_tokenizer(name: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model without the model; remote code is not run."""
    import torch

    request = _Request(name, locate(name, revision), revision, False, torch.device("cpu"), torch.float32, None, None)
    with request.access, _quiet_transformers():
        return _load_tokenizer(request)


@dataclass(frozen=True)
class _Request:
    """What to load, from where (``directory`` is empty for a hub model) and how."""

    name: str
    directory: Path | None
    revision: str | None
    trust_remote_code: bool
    device: torch.device
    precision: torch.dtype
    quantization: Any
    attention: str | None

    @property
    def source(self) -> str:
        return str(self.directory or self.name)

    @property
    def access(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the model's files are read."""
        return hub_or_cache() if self.directory is None else contextlib.nullcontext()

    @property
    def options(self) -> dict[str, Any]:
        """Options of every ``from_pretrained``."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def known_failure(self, error: Exception) -> InputError | None:
        """The error for failures that any of the files can cause, or ``None``."""
        return hub_failure(self.name, self.revision, error) or remote_code_failure(self.name, error)


def _quantization(bits: int | None, precision: torch.dtype) -> Any:
    """The quantisation config for ``bits``: NF4 with double quantisation as in QLoRA, or LLM.int8."""
    if bits is None:
        return None
    if bits not in (4, 8):
        raise InputError(f"cannot quantise to {bits} bits; choose 4 or 8")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(f"loading in {bits} bits needs bitsandbytes; run: pip install bitsandbytes")
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precision,
    )


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence the library's messages and progress bars; relevant problems are raised as errors here."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _load_config(request: _Request) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(request.source, **request.options)
    except Exception as error:  # any problem with the config file is a user error
        raise request.known_failure(error) or InputError(
            f"{request.name}: its config.json cannot be used: {first_line(error)}"
        ) from error
    _require_causal(request.name, config)
    return config


def _require_causal(name: str, config: PreTrainedConfig) -> None:
    """Refuse a model that is not causal: transformers would load it, if necessary with a random head."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    classes = config.architectures or [CAUSAL.get(config.model_type, config.model_type)]
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = own_code or any(kind in CAUSAL.values() for kind in classes)
    if getattr(config, "is_encoder_decoder", False) or not known:
        raise InputError(
            f"{name}: is a {', '.join(classes)}, not a causal language model; choose one like LlamaForCausalLM"
        )


def _load_tokenizer(request: _Request) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(request.source, **request.options)
    except Exception as error:  # the library raises many types for missing and unreadable files
        raise request.known_failure(error) or InputError(
            f"{request.name}: no tokenizer can be loaded from it ({first_line(error)}); "
            "it needs the files of tokenizer.save_pretrained"
        ) from error
    if tokenizer.pad_token is None:
        _pad_with_end(tokenizer, request.name)
    return tokenizer


def _pad_with_end(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Use the end token for padding, which no other token attends to."""
    if tokenizer.eos_token is None:
        raise InputError(f"{name}: its tokenizer has neither a pad nor an end token; give it one of them")
    tokenizer.pad_token = tokenizer.eos_token


def _load_weights(request: _Request, config: PreTrainedConfig) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    plain_cpu = request.device.type == "cpu" and request.quantization is None
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            request.source,
            config=config,
            dtype=request.precision,
            device_map=None if plain_cpu else {"": request.device},
            quantization_config=request.quantization,
            attn_implementation=request.attention,
            use_safetensors=True,
            output_loading_info=True,
            **request.options,
        )
    except SafetensorError as error:
        raise damaged_weights(request.name, request.directory, error) from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        failure = request.known_failure(error) or _weights_failure(request, error)
        if failure is None:
            raise
        raise failure from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # the library initialised them randomly
        raise InputError(f"{request.name}: its weights lack {len(missing)} tensors, such as {missing[0]!r}")
    return model


def _weights_failure(request: _Request, error: Exception) -> InputError | None:
    """The error for a failure to build the model, or ``None`` if the user cannot fix it."""
    name, reason = request.name, first_line(error)
    if "ignore_mismatched_sizes" in str(error):
        return InputError(f"{name}: the shapes of its weights do not fit its config.json; get the model again")
    if request.attention is not None and isinstance(error, ValueError | ImportError):
        return InputError(f"{name}: cannot use attention {request.attention!r}, try 'sdpa' or 'eager': {reason}")
    if request.quantization is not None and not isinstance(error, OSError):
        return InputError(f"{name}: bitsandbytes cannot quantise it here, it may need a CUDA device: {reason}")
    if isinstance(error, ImportError):
        return InputError(f"{name}: its weights need a package that is missing: {reason}")
    if isinstance(error, OSError) and error.errno is None:  # raised by the library, not by the system
        return InputError(f"{name}: its weights cannot be loaded: {reason}")
    return None
