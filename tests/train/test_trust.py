"""Code that a model brings along runs only if the caller says so: never because a file does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bayeslora import load_run
from bayeslora.cli import VERBS, parse
from bayeslora.errors import InputError
from bayeslora.runs.saved_config import from_dict, to_dict
from bayeslora.train import RunConfig
from train import tiny
from train.tiny import bayeslora, read_json

PLANTED = """from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()
class Config(LlamaConfig):
    model_type = "planted"
class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture
def honest() -> Path:
    """A run of a model without code; not to be changed."""
    return tiny.finished()


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that is there once the planted code has run."""
    return tmp_path / "planted code has run"


@pytest.fixture
def planted(honest: Path, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody else's run: its model brings code, and all its files say that this is fine."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(tiny.model_directory(), model)
    (model / "planted.py").write_text(PLANTED.format(mark=str(mark)))
    settings = read_json(model / "config.json")
    own = {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"}
    (model / "config.json").write_text(json.dumps(settings | {"model_type": "planted", "auto_map": own}))
    shutil.copytree(honest, run)
    config = read_json(run / "config.json") | {"model": str(model)}
    config["loading"]["trust_remote_code"] = True
    for name in ("config.json", "result.json"):
        record = config if name == "config.json" else read_json(run / name) | {"config": config}
        (run / name).write_text(json.dumps(record))
    return run


QUESTION = ("--question", "Is 3 even?", "--choice", "yes", "--choice", "no")
COMMANDS: dict[str, tuple[Any, ...]] = {
    "predict": QUESTION,
    "evaluate": (),
    "calibrate": (),
    "generate": ("--prompt", "Is"),
    "export": ("--out", "exported"),
    "merge": ("--out", "merged"),
    "serve": ("--port", 0),
    "cascade": ("--second", "some/one", "--threshold", 0.5),
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_run_of_somebody_else_executes_nothing(
    verb: str, planted: Path, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bayeslora(verb, planted, *COMMANDS[verb], "--quiet") == 2
    assert "needs code of its own" in capsys.readouterr().err and not mark.exists()


@pytest.mark.parametrize("given", ["--config", "--start-from"])
def test_settings_from_a_file_execute_nothing(
    given: str, planted: Path, mark: Path, tmp_path: Path, capsys: Any
) -> None:
    source = planted / "config.json" if given == "--config" else planted
    if given == "--start-from":
        (planted / "config.json").write_text(json.dumps(read_json(planted / "config.json") | {"method": "lora"}))
    assert bayeslora("train", given, source, "--out", tmp_path / "new", "--quiet") == 2
    assert "needs code of its own" in capsys.readouterr().err and not mark.exists()


def test_load_run_executes_nothing_unless_it_is_told_to(planted: Path, mark: Path) -> None:
    with pytest.raises(InputError, match="give --trust-remote-code"):
        load_run(planted)
    assert not mark.exists()
    assert load_run(planted, trust_remote_code=True).ask("Is 3 even?", ["yes", "no"]).probabilities
    assert mark.exists()


def test_a_verb_that_is_told_to_runs_it_and_writes_nothing_that_enables_it(
    planted: Path, mark: Path, tmp_path: Path, capsys: Any
) -> None:
    assert bayeslora("predict", planted, *QUESTION, "--trust-remote-code", "--quiet") == 0
    assert mark.exists()
    exported = tmp_path / "exported"
    assert bayeslora("export", planted, "--out", exported, "--trust-remote-code", "--quiet") == 0
    manifest = read_json(exported / "manifest.json")
    assert not any("trust" in command for command in manifest["commands"].values())
    assert any("code of its own" in warning for warning in manifest["warnings"])
    model = read_json(planted / "config.json")["model"]
    words = tiny.options(tmp_path / "own", "--model", model, "--trust-remote-code", "--epochs", 1)
    assert bayeslora(*words) == 0
    assert "trust" not in (tmp_path / "own" / "config.json").read_text()


def test_every_verb_that_loads_a_model_can_be_told() -> None:
    loading = {
        "train",
        "evaluate",
        "calibrate",
        "predict",
        "generate",
        "serve",
        "cascade",
        "compare",
        "ablate",
        "tune",
        "export",
        "merge",
    }
    assert {name for name, verb in VERBS.items() if "trust_remote_code" in verb.__dataclass_fields__} == loading


def test_saved_settings_are_the_same_with_and_without_it(honest: Path) -> None:
    saved = read_json(honest / "config.json")
    assert "trust_remote_code" not in saved["loading"]
    saved["loading"]["trust_remote_code"] = True
    assert to_dict(from_dict(saved)) == read_json(honest / "config.json")
    assert not hasattr(RunConfig(model="m", task="t").loading, "trust_remote_code")
    assert parse(["predict", "run", *QUESTION]).trust_remote_code is False  # type: ignore[attr-defined]
