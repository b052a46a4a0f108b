"""Adapters from anywhere: plain LoRAs of PEFT, and what a trainer with our mixin has saved."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bayeslora import BayesLoraConfig, cli, load_model, load_run
from bayeslora.errors import InputError
from bayeslora.models import load as loading
from bayeslora.models.locate import BUILTINS, Builtin
from bayeslora.predict.calibrate import Calibration
from bayeslora.runs.adapters import portable_settings, run_of_adapter
from bayeslora.runs.directory import RunDirectory
from tiers import some
from train.tiny import bayeslora, contents, finished, model_directory, task_directory

QUESTION = ["--question", "Is 3 even?", "--choice", "yes", "--choice", "no"]


def save_lora(place: Path, **settings: Any) -> Path:
    """A plain LoRA that has learnt something, as PEFT saves it."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_directory())
    model = get_peft_model(
        base, LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"], **settings})
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(place)
    return place


def save_ours(place: Path, **settings: Any) -> Path:
    """A posterior, as a trainer saves it."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_directory())
    model = get_peft_model(base, BayesLoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **settings}))
    with torch.no_grad():
        for parameter in model.base_model.holder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(place)
    return place


@pytest.fixture(params=some(["lora", "inducing", "decoupled", "meanfield"], ["lora", "inducing"]))
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    place = tmp_path / "adapter"
    return save_lora(place) if request.param == "lora" else save_ours(place, posterior=request.param)


def test_every_verb_takes_an_adapter(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(adapter)
    assert bayeslora("predict", adapter, *QUESTION) == 0
    out, err = capsys.readouterr()
    assert "answer: " in out and "no settings of a run; it predicts with 4 draws" in err
    assert bayeslora("evaluate", adapter, "--task", task_directory(), "--quiet") == 0
    assert bayeslora("generate", adapter, "--prompt", "Is 3", "--max-new-tokens", 3, "--quiet") == 0
    assert bayeslora("export", adapter, "--samples", 2, "--out", tmp_path / "exported", "--quiet") == 0
    assert bayeslora("merge", adapter, "--out", tmp_path / "merged", "--quiet") == 0
    assert contents(adapter) == before
    assert bayeslora("evaluate", adapter, "--quiet") == 2
    assert "names no task; give --task" in capsys.readouterr().err


def test_calibration_is_kept_beside_the_adapter(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(adapter)
    assert bayeslora("calibrate", adapter, "--task", task_directory(), "--coverage", 0.5, "--quiet") == 0
    kept = Calibration.load(adapter / "calibration.json")
    assert kept.threshold is not None
    config = json.loads((adapter / "adapter_config.json").read_text())
    if config["peft_type"] == "LORA":
        assert {name: contents(adapter)[name] for name in before} == before
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_directory()), adapter)
    else:
        assert config["posterior_scale"] == kept.posterior_scale
    assert load_run(adapter).calibration == kept


@pytest.mark.parametrize(
    "settings", [{"rank_pattern": {"v_proj": 2}, "use_rslora": True}, {"target_modules": ["q_proj", "lm_head"]}]
)
def test_a_plain_lora_predicts_as_peft_does(settings: dict[str, Any], tmp_path: Path) -> None:
    place = save_lora(tmp_path / "adapter", **settings)
    ids = torch.tensor([[1, 2, 3, 4]])
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_directory()), place).eval()
    with torch.no_grad():
        expected = theirs(ids).logits
        found = load_run(place).model(ids).logits
    assert found.numpy() == pytest.approx(expected.numpy(), abs=1e-4)


def test_the_posterior_keeps_its_scale(tmp_path: Path) -> None:
    """Also where predictions are compared as trained and after calibration; without one, they are the same."""
    place = save_ours(tmp_path / "adapter", posterior="inducing", posterior_scale=0.25)
    run = load_run(place)
    assert run.model.base_model.posterior_scale == 0.25
    items = run.find_task(task_directory()).test
    alone = run.predict(items)
    before, after = run.predict_both(items)
    assert after is None and np.array_equal(before.probabilities, alone.probabilities)
    assert run.model.base_model.posterior_scale == 0.25 and "as trained" in repr(run)
    run.calibrate(task_directory())
    assert load_run(place).model.base_model.posterior_scale == run.calibration.posterior_scale
    assert load_run(place, raw=True).model.base_model.posterior_scale == 1.0


@pytest.mark.parametrize(
    "method",
    some(
        ["deep-ensemble", "tfb", "laplace", "temperature", "checkpoint-ensemble", "pvera", "monteclora"],
        ["deep-ensemble"],
    ),
)
def test_the_adapter_of_a_run_is_enough_by_itself(method: str, tmp_path: Path) -> None:
    """As it lies on the hub, for methods that are made of LoRAs and PEFT's own, too."""
    run = finished(method)
    shutil.copytree(run / "adapter", tmp_path / "adapter")
    settings = portable_settings(RunDirectory(run).read_result())
    (tmp_path / "adapter/bayeslora.json").write_text(json.dumps(settings))
    alone = load_run(tmp_path / "adapter", model=model_directory()).ask("Is 3 even?", ["yes", "no"])
    assert alone.probabilities == pytest.approx(load_run(run).ask("Is 3 even?", ["yes", "no"]).probabilities, abs=1e-6)


@pytest.mark.parametrize(("nli", "kept"), [("org/nli", "org/nli"), ("directory/of/nli", None), (None, None)])
def test_settings_of_free_answers_go_along_but_for_paths(nli: str | None, kept: str | None) -> None:
    result = RunDirectory(finished()).read_result()
    prediction = {**result.config["prediction"], "max_new_tokens": 7, "nli": nli}
    settings = portable_settings(replace(result, config={**result.config, "prediction": prediction}))
    assert settings["prediction"]["max_new_tokens"] == 7 and settings["prediction"].get("nli") == kept


def test_a_run_whose_base_model_was_moved_says_how_to_name_it(tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished(), tmp_path / "run"))
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    (run / "config.json").write_text(json.dumps({**config, "model": "/gone/model"}), encoding="utf-8")
    with pytest.raises(InputError, match="its base model is no longer at /gone/model; give --model with its new place"):
        load_run(run)
    assert load_run(run, model=model_directory()).config.model == model_directory()


def test_the_base_model_may_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = save_lora(tmp_path / "adapter")
    file = place / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": None}))
    assert bayeslora("predict", place, *QUESTION, "--quiet") == 2
    assert "does not name its base model; give it with --model" in capsys.readouterr().err
    assert bayeslora("predict", place, *QUESTION, "--model", model_directory(), "--quiet") == 0


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of models whose weights are loaded from now on."""
    found: list[str] = []
    load = loading._load_weights
    monkeypatch.setattr(
        loading, "_load_weights", lambda request, config: (found.append(request.name), load(request, config))[1]
    )
    return found


@pytest.fixture
def builtin(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a built-in model, ``tiny``, whose original has another name on the hub."""
    base = tmp_path_factory.mktemp("built-in") / "model"
    shutil.copytree(model_directory(), base)
    monkeypatch.setitem(BUILTINS, "tiny", Builtin("", "", lambda: base, lambda: base, "org/original"))
    return base


def test_an_adapter_of_the_built_in_model_does_not_look_for_its_original_on_the_hub(
    builtin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It records the original's name on the hub, where the weights are others."""
    model = get_peft_model(load_model("tiny").model, BayesLoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    assert json.loads(file.read_text())["base_model_name_or_path"] == "org/original"
    loads = counted(monkeypatch)
    run = load_run(tmp_path)
    assert (
        loads == ["tiny"]
        and run.config.model == "tiny"
        and run.ask("Is 3 even?", ["yes", "no"]).choices == ("yes", "no")
    )
    for unlike in ("1:exact:0", None):  # of the original, or not known
        file.write_text(json.dumps({**json.loads(file.read_text()), "base_fingerprint": unlike}))
        assert run_of_adapter(RunDirectory(tmp_path)).model == "org/original"
    monkeypatch.setitem(BUILTINS, "tiny", Builtin("", "", lambda: None, lambda: builtin, "org/original"))
    assert run_of_adapter(RunDirectory(tmp_path)).model == "org/original"


def test_training_from_an_adapter_of_the_built_in_model_does_not_look_for_its_original(
    builtin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_peft_model(load_model("tiny").model, BayesLoraConfig(posterior="point", r=2)).save_pretrained(tmp_path)
    words = ["train", "--start-from", str(tmp_path), "--task", "urns", "--out", "x"]
    assert cli.parse(words).experiment.model == "tiny"
    assert cli.parse([*words, "--model", "org/other"]).experiment.model == "org/other"


def test_a_damaged_built_in_model_is_told(builtin: Path, tmp_path: Path) -> None:
    model = get_peft_model(load_model("tiny").model, BayesLoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    weights = builtin / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(InputError, match=r"^tiny: model\.safetensors is damaged or incomplete"):
        load_run(tmp_path)


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    message = f"{tmp_path}/nowhere: no such directory; give that of a run or an adapter, or an adapter's id on the hub"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        load_run(tmp_path / "nowhere")


def test_an_exported_lora_of_the_built_in_model_does_not_look_for_its_original_either(
    builtin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = get_peft_model(load_model("tiny").model, BayesLoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.export_samples(1, tmp_path)
    for place in (tmp_path / "mean", tmp_path / "sample-000"):
        assert json.loads((place / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/original"
        assert load_run(place).config.model == "tiny"
    file = tmp_path / "mean/adapter_model.safetensors"
    save_file(load_file(file), file)  # as PEFT would: of the original, for all that is known
    assert run_of_adapter(RunDirectory(tmp_path / "mean")).model == "org/original"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"peft_type": "IA3"}, "holds an adapter of kind IA3, which cannot be used by itself"),
        ({"use_dora": True}, "of the kind DoRA; only plain LoRA"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, r"adapter: target module .*\(Embedding\) is not supported"),
    ],
)
def test_other_adapters_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    place = save_lora(tmp_path / "adapter")
    file = place / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(InputError, match=message):
        load_run(place)


def test_damaged_adapters_are_refused(tmp_path: Path) -> None:
    place = save_lora(tmp_path / "adapter")
    (place / "adapter_config.json").write_text("[]")
    with pytest.raises(InputError, match="holds no JSON object"):
        load_run(place)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        InputError,
        match="holds no run that can be used; give a directory that bayeslora train, PEFT or TRL has written",
    ):
        load_run(tmp_path / "empty")


def test_an_adapter_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = save_lora(tmp_path / "adapter")
    asked: dict[str, Any] = {}

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        if name != "org/adapter":
            raise OSError(f"no {name}\nand more")
        shutil.copytree(place, tmp_path / "cache", dirs_exist_ok=True)
        return str(tmp_path / "cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_run("org/adapter").ask("Is 3 even?", ["yes", "no"]).probabilities
    assert asked["org/adapter"] == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "calibration.json",
        "familiarity.safetensors",
        "bayeslora.json",
    ]
    with pytest.raises(InputError, match=r"no adapter could be loaded from the hub \(no org/other\)"):
        load_run("org/other")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/mine").mkdir(parents=True)
    with pytest.raises(
        InputError, match=r"runs/mien: is no directory here \(did you mean 'runs/mine'\?\), and no adapter"
    ):
        load_run("runs/mien")


@pytest.mark.parametrize("kind", ["lora", "inducing"])
@pytest.mark.parametrize(
    "damage", ["the first is missing", "the last is missing", "the first is too small", "calibration"]
)
def test_a_shared_base_model_is_itself_after_a_run_that_cannot_be_loaded(
    kind: str, damage: str, tmp_path: Path
) -> None:
    sound, place = tmp_path / "sound", tmp_path / "damaged"
    for folder in (sound, place):
        save_lora(folder) if kind == "lora" else save_ours(folder, posterior=kind)
    if damage == "calibration":
        (place / "calibration.json").write_text("{}")
    else:
        tensors = load_file(place / "adapter_model.safetensors")
        name = sorted(tensors)[0 if "first" in damage else -1]
        found = tensors.pop(name)
        if "too small" in damage:
            tensors[name] = torch.zeros(3, *found.shape[1:])
        save_file(tensors, place / "adapter_model.safetensors")
    loaded = load_model(str(model_directory()))
    before = [(name, type(module)) for name, module in loaded.model.named_modules()]
    ids = torch.arange(12)[None]
    with torch.no_grad():
        plain = loaded.model(ids).logits
        with pytest.raises(InputError):
            load_run(place, loaded=loaded)
        assert [(name, type(module)) for name, module in loaded.model.named_modules()] == before
        assert torch.equal(loaded.model(ids).logits, plain)
    assert load_run(sound, loaded=loaded).ask("Is 3 even?", ["yes", "no"]).probabilities
