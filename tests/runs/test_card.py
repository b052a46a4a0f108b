"""The model card, and the way to the hub and back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from peft import AutoPeftModelForCausalLM

from bayeslora import load_run
from bayeslora.errors import InputError
from bayeslora.metrics import reliability_bins_from_confidence
from bayeslora.runs.card import make_card, public_name
from bayeslora.runs.card_figure import reliability_svg
from bayeslora.runs.result import RunResult
from bayeslora.train import DataConfig, PredictionConfig, TrainingConfig, train
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


def test_the_card_shows_the_reliability_before_and_after_calibration(run: Path) -> None:
    result = read_json(run / "result.json")
    before, after = result["metrics"]["ece"], result["calibrated"]["metrics"]["ece"]
    shown = f"with a calibration error (ECE) of as trained {before:.3f} and calibrated {after:.3f}](reliability.svg)"
    assert shown in (run / "adapter" / "README.md").read_text(encoding="utf-8")
    texts = texts_of((run / "adapter" / "reliability.svg").read_text(encoding="utf-8"))
    assert [texts[texts.index(side) + 1] for side in ("as trained", "calibrated")] == [
        f"calibration error (ECE) {before:.3f}",
        f"calibration error (ECE) {after:.3f}",
    ]


def texts_of(svg: str) -> list[str]:
    return [str(it.text) for it in ElementTree.fromstring(svg).iter() if it.tag.endswith("text")]


def test_the_diagram_draws_what_the_bins_say() -> None:
    """Of twelve sure predictions nine are right, and of three doubtful ones two."""
    confidence, correct = [0.9] * 12 + [0.5] * 3, [True] * 9 + [False] * 3 + [True, True, False]
    bins = reliability_bins_from_confidence(confidence, correct, 5)
    boxes = [
        it.attrib for it in ElementTree.fromstring(reliability_svg({"<&>": bins})).iter() if it.tag.endswith("rect")
    ]

    def size(box: dict[str, str], key: str) -> float:
        return float(box[key]) / 210

    bars = [box for box in boxes if box["fill"] == "#0072B2" and float(box["width"]) > 12]
    gaps = [box for box in boxes if box["fill"] == "#F7DFCC" and float(box["width"]) > 12]
    assert [size(box, "height") for box in bars] == pytest.approx([2 / 3, 0.75], abs=1e-3)
    assert [size(box, "height") for box in gaps] == pytest.approx([2 / 3 - 0.5, 0.9 - 0.75], abs=1e-3)
    assert [size(box, "y") for box in gaps] == pytest.approx([1 + 44 / 210 - 2 / 3, 1 + 44 / 210 - 0.9], abs=1e-3)
    assert ["opacity" in box for box in bars] == [True, False]  # three are few
    heights = [float(box["height"]) for box in boxes if box["fill"] == "#7F7F7F"]
    assert heights[0] / heights[1] == pytest.approx(3 / 12, abs=0.01)
    assert "<&>" in texts_of(reliability_svg({"<&>": bins}))


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
    assert public_name("some/where/Model-1.5B-Chat") == "Model-1.5B-Chat" and public_name("a/b/chats.csv") == "chats"


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

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert set(allow_patterns) >= {path.name for path in (place / name).iterdir()} - {
            "README.md",
            "reliability.svg",
        }
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
        "familiarity.safetensors",
        "reliability.svg",
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
        assert answer.choices == ("even", "odd") and answer.distance is not None
    assert back.classify(["the number 7"])[0].probabilities == pytest.approx(
        local.classify(["the number 7"])[0].probabilities, abs=1e-6
    )


def test_paths_are_not_taken_for_names_of_the_hub_in_another_directory(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``models/base`` is a directory where the run was trained, and has the form of an id."""
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(model_directory(), tmp_path / "models/base")
    for start, split in enumerate(("train", "validation", "test")):
        rows = [{"text": f"{k}", "label": "ab"[k % 2]} for k in range(20 * start, 20 * start + 20)]
        write_lines(tmp_path / f"data/secret/{split}.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    quick = TrainingConfig(epochs=1, batch_size=30)
    prediction = PredictionConfig(samples=2)
    train(run_config(model="models/base", task="data/secret", training=quick, prediction=prediction), Path("run"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert bayeslora("push", tmp_path / "run", "org/tickets") == 0
    for path in (hub / "org/tickets").iterdir():
        content = path.read_bytes()
        assert b"models/base" not in content and b"data/secret" not in content and bytes(tmp_path) not in content
    assert "# bayesian-lora on secret" in (hub / "org/tickets/README.md").read_text(encoding="utf-8")
    assert read_json(hub / "org/tickets/calibration.json")["task"] == "secret"


def test_a_calibration_from_the_hub_is_replaced_only_if_that_is_wanted(
    run: Path, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bayeslora("push", run, "org/tickets") == 0
    words = (
        "calibrate",
        "org/tickets",
        "--model",
        model_directory(),
        "--task",
        run.parent / "tickets.jsonl",
        "--quiet",
    )
    assert bayeslora(*words, "--coverage", 0.5) == 0  # in place of that of training
    kept = (hub / "org/tickets/calibration.json").read_bytes()
    capsys.readouterr()
    assert bayeslora(*words) == 2 and "is calibrated already; use --force" in capsys.readouterr().err
    assert (hub / "org/tickets/calibration.json").read_bytes() == kept


def test_a_server_calls_a_model_of_the_hub_by_its_id(run: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr("bayeslora.server.run.serve", lambda trained, name, *rest: names.append(name) or True)
    assert bayeslora("push", run, "org/tickets") == 0
    assert bayeslora("serve", "org/tickets", "--model", model_directory(), "--port", 0, "--quiet") == 0
    assert bayeslora("serve", run, "--port", 0, "--quiet") == 0
    assert names == ["org/tickets", "run"]


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
    "file, content, message",
    [
        ("adapter_config.json", None, "adapter: has no adapter_config.json; restore it"),
        ("adapter_model.safetensors", None, "adapter: has no adapter_model.safetensors; restore it"),
        ("adapter_config.json", "{", "adapter/adapter_config.json: cannot be read as JSON"),
        ("calibration.json", "{", "adapter/calibration.json: not a calibration"),
    ],
)
def test_a_run_with_a_broken_adapter_is_not_uploaded(
    file: str,
    content: str | None,
    message: str,
    run: Path,
    hub: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (broken / "adapter" / file).unlink()
    if content is not None:
        (broken / "adapter" / file).write_text(content)
    assert bayeslora("push", broken, "org/tickets") == 2
    assert f"{broken}/{message}" in capsys.readouterr().err
    assert not hub.exists()


@pytest.mark.parametrize(
    "changes", some([{"seed": -1}, {"data": {"scoring": "sound"}}, {"prediction": 3}], [{"seed": -1}])
)
def test_settings_from_the_hub_are_checked(changes: dict[str, Any], run: Path, hub: Path) -> None:
    assert bayeslora("push", run, "org/tickets") == 0
    file = hub / "org/tickets" / "bayeslora.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(InputError, match=r"bayeslora\.json: "):
        load_run("org/tickets", model=model_directory())
