"""The model card, and the way to the hub and back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import AutoPeftModelForCausalLM

from bayeslora import load_run
from bayeslora.errors import InputError
from bayeslora.runs.card import make_card, public_name
from bayeslora.runs.result import RunResult
from bayeslora.train import DataConfig, PredictionConfig, train
from tasks.cases import write_lines
from tiers import some
from train.tiny import bayeslora, model_directory, read_json, run_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated run on texts with labels; not to be changed."""
    place = tmp_path_factory.mktemp("card")
    rows = [{"body": f"the number {k}", "label": ["even", "odd"][k % 2]} for k in range(60)]
    task = write_lines(place / "tickets.jsonl", rows)
    data = DataConfig(max_tokens=64, columns={"text": "body"})
    train(run_config(task=str(task), data=data, prediction=PredictionConfig(samples=3)), place / "run")
    return place / "run"


def test_the_card_says_what_a_user_needs_and_no_path(run: Path) -> None:
    card = (run / "adapter" / "README.md").read_text(encoding="utf-8")
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["bayeslora", "bayesian-lora", "lora", "uncertainty-estimation", "calibration"],
    }
    result = read_json(run / "result.json")
    assert "# bayesian-lora on tickets" in text and str(run.parent) not in card and model_directory() not in card
    after = result["calibrated"]["metrics"]
    assert f"| NLL, nats | {result['metrics']['nll']:.4f} | {after['nll']:.4f} |" in text
    assert f"it says it is {after['confidence']:.0%} sure on average, and is right in {after['acc']:.0%}" in text
    assert "AutoPeftModelForCausalLM" in text and "The base model has no name on the hub" in text
    assert "- learning_rate: 0.01" in text and "[More Information Needed]" not in card


def test_names_of_the_hub_are_tags(tmp_path: Path) -> None:
    result = RunResult(
        config={"method": "lora", "task": "org/data"},
        metrics={"nll": 1.0, "acc": 0.5, "confidence": 0.57},
        kind="questions",
    )
    card = make_card(result, "org/base")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "org/base" and front["datasets"] == ["org/data"]
    assert "it says it is 57% sure on average, and is right in 50% of the cases" in card and "| calibrated" not in card
    assert public_name("some/where/secret/chats.jsonl") == "chats" and public_name("arc-easy") == "arc-easy"


def test_peft_loads_it_at_the_mean(run: Path) -> None:
    model = AutoPeftModelForCausalLM.from_pretrained(run / "adapter").eval()
    assert model.peft_config["default"].peft_type == "BAYESLORA"
    assert load_run(run / "adapter").config.task.endswith("tickets.jsonl")  # the run that it belongs to


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of the hub."""
    place = tmp_path / "hub"

    class Api:
        def __init__(self, token: str | None = None) -> None:
            self.token = token

        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
            if name.startswith("no/"):
                raise PermissionError("you may not\nwrite there")
            (place / name).mkdir(parents=True, exist_ok=exist_ok)

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> str:
            shutil.copytree(folder_path, place / repo_id, dirs_exist_ok=True)
            return f"https://hub/{repo_id}"

    def download(name: str, allow_patterns: list[str]) -> str:
        assert set(allow_patterns) >= {path.name for path in (place / name).iterdir()} - {"README.md"}
        return str(place / name)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return place


def test_to_the_hub_and_back(run: Path, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("push", run, "org/tickets") == 0
    assert capsys.readouterr().out == "https://hub/org/tickets\n"
    sent = {path.name: path.read_bytes() for path in (hub / "org/tickets").iterdir()}
    assert set(sent) == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "bayeslora.json",
        "calibration.json",
    }
    for content in sent.values():
        assert model_directory().encode() not in content and str(run.parent).encode() not in content
    local, back = load_run(run), load_run("org/tickets", model=model_directory())
    assert (
        back.calibration == replace(local.calibration, task="tickets")
        and back.samples == 3
        and back.config.data.columns == {"text": "body"}
    )
    for model in (local, back):
        [answer] = model.classify(["the number 7"])
        assert answer.choices == ("even", "odd")
    assert back.classify(["the number 7"])[0].probabilities == pytest.approx(
        local.classify(["the number 7"])[0].probabilities, abs=1e-6
    )


@pytest.mark.parametrize("labels", [[1, 2], "ab", {"a": 1}])
def test_labels_from_the_hub_are_texts(labels: Any, run: Path, hub: Path) -> None:
    assert bayeslora("push", run, "org/tickets") == 0
    file = hub / "org/tickets" / "bayeslora.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "labels": labels}))
    with pytest.raises(InputError, match=r"bayeslora\.json: labels is "):
        load_run("org/tickets", model=model_directory()).classify(["x"])


def test_what_cannot_be_uploaded(run: Path, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("push", run, "no/where") == 2
    assert "no/where: cannot be uploaded (you may not); check the name" in capsys.readouterr().err
    assert bayeslora("push", tmp_path, "org/x") == 2
    assert "holds no finished run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes", some([{"seed": -1}, {"data": {"scoring": "sound"}}, {"prediction": 3}], [{"seed": -1}])
)
def test_settings_from_the_hub_are_checked(changes: dict[str, Any], run: Path, hub: Path) -> None:
    assert bayeslora("push", run, "org/tickets") == 0
    file = hub / "org/tickets" / "bayeslora.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(InputError, match=r"bayeslora\.json: "):
        load_run("org/tickets", model=model_directory())
