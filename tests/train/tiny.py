"""A tiny random Llama with a tokenizer of its own, questions to train it on, and runs that take a second."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from bayeslora import cli
from bayeslora.predict.questions.predictions import Predictions
from bayeslora.runs.saved_config import to_dict
from bayeslora.train import AdapterConfig, PredictionConfig, RunConfig, TrainingConfig, resolve, train
from tasks.cases import write_lines

LAYERS = 3
SIZES = {"train": 12, "validation": 10, "test": 8}
STEPS = 6  # of a run as `run_config` and `options` describe it
END = "<|end|>"
HOME = "BAYESLORA_TEST_HOME"


_INTERVALS = Predictions.intervals


@functools.cache
def _home() -> Path:
    """One directory for all processes of a test run, which removes it (see tests/conftest.py)."""
    return Path(os.environ.get(HOME) or tempfile.mkdtemp(prefix="bayeslora-tiny-"))


def _made_once(name: str, make: Callable[[Path], object]) -> Path:
    """A directory that the first process to ask for it fills."""
    place = _home() / name
    with FileLock(f"{place}.lock"):
        if not place.exists():
            partial = place.with_name(f"{name}.partial")
            make(partial)
            partial.rename(place)
    return place


METHOD = "bayesian-lora"
PRESET = "inducing"
"""Of the run that most tests use: the form of the posterior with the most parts."""


def finished(method: str = METHOD, **changes: Any) -> Path:
    """The run that :func:`run_config` describes, made once in a test run; copy it before you change it."""
    config = resolve(run_config(method, **changes))
    key = hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:16]

    def make(place: Path) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Predictions, "intervals", _INTERVALS)
            train(config, place)

    return _made_once(f"run-{key}", make)


@functools.cache
def model_directory() -> str:
    """Where the model lies: the same weights and the same tokenizer every time."""
    return str(_made_once("model", _make_model))


def _make_model(directory: Path) -> None:
    logging.disable_progress_bar()
    make_tokenizer().save_pretrained(directory)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=512,
        initializer_range=0.2,  # large, so that options differ in probability
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, in which the letters A to D are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" A B C D", "Question: Is it even? Options: yes no Answer:"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def question(number: int, **changes: Any) -> dict[str, Any]:
    """A question with two or three choices of different lengths."""
    choices = ["yes", "no", "who knows"][: 2 + number % 2]
    return {"id": f"q{number}", "question": f"Is {number} even?", "choices": choices, "answer": number % 2} | changes


def write_task(directory: Path, **splits: list[Any]) -> Path:
    """A directory with three splits; a split that is given is written as it stands."""
    start = 0
    for split, size in SIZES.items():
        rows = splits.get(split, [question(start + k) for k in range(size)])
        write_lines(directory / f"{split}.jsonl", rows)
        start += size
    return directory


@functools.cache
def task_directory() -> str:
    """Questions in three splits."""
    return str(_made_once("task", write_task))


def run_config(method: str = METHOD, **changes: Any) -> RunConfig:
    """A run of six steps in two epochs."""
    settings: dict[str, Any] = {
        "model": model_directory(),
        "task": task_directory(),
        "method": method,
        "preset": PRESET if method == METHOD else "default",
        "adapter": AdapterConfig(rank=2, targets=("q_proj", "v_proj")),
        "training": TrainingConfig(epochs=2, batch_size=4, learning_rate=0.01),
        "prediction": PredictionConfig(samples=3, calibrate="none"),
    }
    return RunConfig(**(settings | changes))


def options(out: Path | str, *more: object) -> list[str]:
    """The same run on the command line, with more options behind, which win."""
    words = ["train", "--model", model_directory(), "--task", task_directory(), "--out", out, "--quiet"]
    words += ["--rank", 2, "--targets", "q_proj", "v_proj", "--epochs", 2, "--batch-size", 4]
    words += ["--learning-rate", 0.01, "--samples", 3, "--calibrate", "none"]
    words += [*(() if {"--method", "--preset"} & set(more) else ("--preset", PRESET)), *more]
    return [str(word) for word in words]


def bayeslora(*words: object) -> int:
    """The command line in this process; gives the exit code."""
    return cli._run([str(word) for word in words])


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def without_intervals() -> Iterator[None]:
    """Inside the block runs leave the bootstrap out, which takes half of their time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Predictions, "intervals", lambda self: {})
        yield


def contents(directory: Path) -> dict[str, bytes]:
    """All files below a directory but the lock."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def outcome(directory: Path) -> dict[str, Any]:
    """What must be the same, to the byte, whenever and however often a run was interrupted."""
    result = read_json(directory / "result.json")
    files = ("adapter/adapter_model.safetensors", "predictions.jsonl.gz")
    kept = ("config", "metrics", "history", "counts", "parameters")
    return {name: (directory / name).read_bytes() for name in files} | {name: result[name] for name in kept}
