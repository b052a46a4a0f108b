"""The command line of runs: settings from files, bad input, output, and the quickstart."""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bayeslora import cli
from bayeslora.cli.common import print_result
from bayeslora.methods import METHODS
from bayeslora.models import load_model
from bayeslora.predict.trunk import TrunkScorer
from bayeslora.progress import PlainLines
from bayeslora.runs.result import RunResult
from bayeslora.runs.saved_config import to_dict
from bayeslora.studies import quickstart as study
from bayeslora.tasks import TASKS, urns_task
from bayeslora.train import AdapterConfig, PredictionConfig, RunConfig, TrainingConfig, resolve
from tasks.cases import choice_row, write_lines
from tiers import some
from train import tiny
from train.tiny import bayeslora, contents, options, outcome, question, read_json, run_config, without_intervals


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed: one line on stderr."""
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("bayeslora: ") and err.count("\n") == 1, err
    assert "Traceback" not in err and "__" not in err and "│" not in err
    return err


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of runs that the command line starts; nothing is trained."""
    seen: list[dict[str, Any]] = []

    def train(config: RunConfig, *args: Any, **kwargs: Any) -> dict[str, Any]:
        seen.append(to_dict(resolve(config)))
        return RunResult(config={}, metrics={})

    monkeypatch.setattr("bayeslora.train.run.train", train)
    return seen


def write_settings(path: Path, values: Any) -> Path:
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


FLAT = {
    "model": "smollm2",
    "task": "urns",
    "preset": "inducing",
    "seed": 7,
    "rank": 3,
    "targets": ["q_proj", "lm_head"],
    "cache_trunk": True,
    "gradient_checkpointing": False,
    "max_train": None,
    "learning_rate": 1e-5,
    "milestones": [2, 3],
    "settings": {"flow_depth": 0, "whitened": False},
    "rate_multipliers": {"flow": 0.5},
}


def test_settings_from_a_flat_file(tmp_path: Path, resolved: list[dict[str, Any]]) -> None:
    file = write_settings(tmp_path / "run.json", FLAT)
    for words in (["--config", file], [f"--config={file}"]):
        assert bayeslora("train", *words, "--out", "x") == 0
    [config, same] = resolved
    assert config == same
    assert (config["model"], config["task"], config["seed"]) == ("smollm2", "urns", 7)
    assert config["adapter"]["rank"] == 3 and config["adapter"]["targets"] == ["q_proj", "lm_head"]
    assert config["adapter"]["settings"]["flow_depth"] == 0 and config["adapter"]["settings"]["whitened"] is False
    assert config["training"]["cache_trunk"] is True and config["training"]["gradient_checkpointing"] is False
    assert config["training"]["learning_rate"] == 1e-5 and config["training"]["milestones"] == [2, 3]
    assert (
        config["training"]["rate_multipliers"] == {"points": 20.0, "flow": 0.5, "weights": 0.35}
        and config["data"]["max_train"] is None
    )


def test_settings_from_a_nested_file(tmp_path: Path, resolved: list[dict[str, Any]]) -> None:
    nested = {"model": "smollm2", "task": "urns", "adapter": {"rank": 5, "settings": {"flow_depth": 2}}}
    assert bayeslora("train", "--out", "x", "--config", write_settings(tmp_path / "run.json", nested)) == 0
    assert resolved[0]["adapter"]["rank"] == 5 and resolved[0]["adapter"]["settings"]["flow_depth"] == 2


@pytest.mark.parametrize("word", ["--rate-multipliers", "--rate_multipliers"])
def test_pairs_are_added_to_those_of_the_file(word: str, tmp_path: Path, resolved: list[dict[str, Any]]) -> None:
    file = write_settings(tmp_path / "run.json", FLAT)
    more = ["--settings", "init_sd_u=0.1", "flow_depth=2", word, "points=3"]
    assert bayeslora("train", "--config", file, *more, "--out", "x") == 0
    settings, training = resolved[0]["adapter"]["settings"], resolved[0]["training"]
    assert (settings["init_sd_u"], settings["flow_depth"], settings["whitened"]) == (0.1, 2, False)
    assert training["rate_multipliers"] == {"points": 3.0, "flow": 0.5, "weights": 0.35} and training["milestones"] == [
        2,
        3,
    ]


def test_settings_from_yaml_are_those_from_json(tmp_path: Path, resolved: list[dict[str, Any]]) -> None:
    text = """
model: smollm2
task: urns
preset: inducing
seed: 7
adapter: {rank: 3, targets: [q_proj, lm_head], settings: {flow_depth: 0, whitened: false}}
cache_trunk: true
learning_rate: 0.00001
milestones: [2, 3]
rate_multipliers:
  flow: 0.5
"""
    for file in (write_settings(tmp_path / "run.yaml", text), write_settings(tmp_path / "run.json", FLAT)):
        assert bayeslora("train", "--config", file, "--out", "x") == 0
    assert resolved[0] == resolved[1]


@pytest.mark.parametrize("number", ["1e-4", "1E-04", ".1e-3", "1.0e-4", "+1e-4", "0.0001"])
def test_numbers_of_yaml_may_have_an_exponent(number: str, tmp_path: Path, resolved: list[dict[str, Any]]) -> None:
    text = f"model: smollm2\ntask: urns\nlearning_rate: {number}\nrevision: 1e-branch\n"
    assert bayeslora("train", "--config", write_settings(tmp_path / "run.yaml", text), "--out", "x") == 0
    assert resolved[0]["training"]["learning_rate"] == 1e-4 and resolved[0]["loading"]["revision"] == "1e-branch"


@pytest.mark.parametrize("name", ["run.json", "run.yaml"])
def test_a_file_of_settings_may_begin_with_a_byte_order_mark(
    name: str, tmp_path: Path, resolved: list[dict[str, Any]]
) -> None:
    file = write_settings(tmp_path / name, f"\ufeff{json.dumps({'model': 'smollm2', 'task': 'urns', 'seed': 7})}")
    assert bayeslora("train", "--config", file, "--out", "x") == 0 and resolved[0]["seed"] == 7


def test_a_file_of_settings_may_name_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write_settings(tmp_path / "run.yaml", "model: smollm2\ntask: urns\nout: ~/runs/first\n")
    assert cli.parse(["train", "--config", str(file)]).out == tmp_path / "runs" / "first"


@pytest.mark.parametrize("word, on", [("--cache-trunk", True), ("--no-cache-trunk", False), (None, True)])
def test_a_flag_of_the_file_can_be_repeated_or_undone(
    word: str | None, on: bool, tmp_path: Path, resolved: list[dict[str, Any]]
) -> None:
    file = write_settings(tmp_path / "run.json", FLAT)
    assert bayeslora("train", "--config", file, "--out", "x", *([word] if word else [])) == 0
    assert resolved[0]["training"]["cache_trunk"] is on


def test_options_of_the_verb_may_stand_in_the_file(tmp_path: Path) -> None:
    values = {**FLAT, "out": "there", "data_dir": "data", "report_to": ["tensorboard"], "quiet": True}
    verb = cli.parse(["train", "--config", str(write_settings(tmp_path / "run.json", values)), "--out", "here"])
    assert (verb.out, verb.data_dir, verb.report_to, verb.quiet) == (Path("here"), Path("data"), ("tensorboard",), True)


def test_what_the_file_leaves_open_is_required(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_settings(tmp_path / "run.json", {"rank": 3})
    assert bayeslora("train", "--config", file, "--model", "smollm2", "--out", "x") == 2
    assert "--task" in (err := refusal(capsys)) and "--model" not in err and "bayeslora train --help" in err


def test_a_run_to_start_from_may_lack_settings_of_its_adapter(tmp_path: Path) -> None:
    write_settings(tmp_path / "config.json", {"model": "smollm2", "adapter": None})
    verb = cli.parse(["train", "--start-from", str(tmp_path), "--task", "urns", "--out", "x"])
    assert verb.experiment.model == "smollm2"


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_an_adapter_of_peft_to_start_from_gives_model_and_shape(targets: Any, tmp_path: Path) -> None:
    said = {"base_model_name_or_path": "org/model", "r": 4, "lora_alpha": 12, "target_modules": targets}
    write_settings(tmp_path / "adapter_config.json", said)
    verb = cli.parse(["train", "--start-from", str(tmp_path), "--task", "urns", "--out", "x", "--alpha", "8"])
    assert (verb.experiment.model, verb.experiment.adapter.rank, verb.experiment.adapter.alpha) == ("org/model", 4, 8)
    assert verb.experiment.adapter.targets == ((targets,) if isinstance(targets, str) else tuple(targets))
    assert verb.experiment.start_from == (str(tmp_path),)


def test_a_wrong_place_to_start_from_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--method", "tfb", "--out", tmp_path / "out", "--start-from"]
    assert bayeslora(*words, tmp_path / "nowhere") == 2
    assert "nowhere: no such directory; give that of a LoRA's run or adapter" in refusal(capsys)
    write_settings(tmp_path / "config.json", to_dict(resolve(RunConfig(model="smollm2", task="urns"))))
    assert bayeslora(*words, tmp_path) == 2
    assert f"{tmp_path}: is a run of method 'bayesian-lora'; give one of method 'lora'" in refusal(capsys)


@pytest.mark.parametrize("where", ["before", "after"])
def test_options_win_over_the_file(where: str, tmp_path: Path, resolved: list[dict[str, Any]]) -> None:
    file = ["--config", write_settings(tmp_path / "run.json", FLAT)]
    given = ["--rank", 9, "--settings", "flow_depth=1", "--targets", "v_proj"]
    assert bayeslora("train", "--out", "x", *(given + file if where == "before" else file + given)) == 0
    assert resolved[0]["adapter"]["rank"] == 9 and resolved[0]["adapter"]["targets"] == ["v_proj"]
    assert resolved[0]["adapter"]["settings"]["flow_depth"] == 1 and resolved[0]["seed"] == 7


@pytest.mark.parametrize(
    "method, preset",
    some(
        [(method, preset) for method in METHODS for preset in ("default", "paper")],
        [("bayesian-lora", "default"), ("bayesian-lora", "paper"), ("laplace", "paper"), ("pvera", "default")],
    ),
)
def test_the_settings_of_a_run_repeat_it(
    method: str, preset: str, tmp_path: Path, resolved: list[dict[str, Any]]
) -> None:
    words = ["--method", method, "--preset", preset, "--model", "smollm2", "--task", "urns", "--layers", "last:2"]
    assert bayeslora("train", "--out", "x", *words) == 0
    assert bayeslora("train", "--out", "x", "--config", write_settings(tmp_path / "config.json", resolved[0])) == 0
    assert resolved[0] == resolved[1]


def test_a_run_from_the_settings_of_another_ends_like_it(tmp_path: Path) -> None:
    assert bayeslora(*options(tmp_path / "one", "--settings", "flow_depth=0", "--rate-multipliers", "points=2")) == 0
    config = tmp_path / "one" / "config.json"
    assert bayeslora("train", "--config", config, "--out", tmp_path / "two", "--quiet") == 0
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    assert read_json(config)["adapter"]["settings"]["flow_depth"] == 0
    assert read_json(config)["training"]["rate_multipliers"] == {"points": 2, "flow": 0.1, "weights": 0.35}


@pytest.mark.parametrize(
    "values, words",
    [
        ({"model": "smollm2", "rnak": 3}, ["unknown setting 'rnak'", "did you mean 'rank'"]),
        ({"adapter": {"colour": 3}}, ["unknown setting 'colour'"]),
        ({"optimizers": {"rank": 3}}, ["unknown setting 'optimizers'"]),
        ({"config": "other.json"}, ["unknown setting 'config'"]),
        ("{", ["cannot be read as JSON"]),
        ("[]", ["holds no JSON object"]),
        ("\xff", ["cannot be read as JSON"]),
        ({"out": 3}, ["out is 3", "give a path"]),
        ({"quiet": "no"}, ["quiet is 'no'", "true or false"]),
        ({"adapter": 3}, ["unknown setting 'adapter'"]),
    ],
)
def test_a_bad_file_of_settings_is_refused_by_name(
    values: Any, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_settings(tmp_path / "run.json", values)
    assert bayeslora("train", "--config", file, "--task", "urns", "--out", tmp_path / "out") == 2
    err = refusal(capsys)
    assert all(word in err for word in [str(file), *words])


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--config"], "--config needs the path"),
        (["--config", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--config", "a.json", "--config", "b.json"], "more than once"),
    ],
)
def test_a_missing_file_of_settings_is_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bayeslora("train", "--out", "x", *words) == 2
    assert reason in refusal(capsys)


@pytest.mark.parametrize("value", [-1, "three", 2.5])
def test_a_bad_value_in_a_file_is_refused_like_one_in_an_option(
    value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_settings(tmp_path / "run.json", {**FLAT, "rank": value})
    assert bayeslora("train", "--out", tmp_path / "out", "--config", file) == 2
    assert "rank" in (err := refusal(capsys)) and str(value) in err


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, reasons",
    some(
        [
            (["--task", "urn"], ["unknown task 'urn' (did you mean 'urns'?)", "arc-easy"]),
            (["--task", "nowhere.jsonl"], ["nowhere.jsonl: no such file"]),
            (["--method", "bayesian-lra"], ["unknown method", "did you mean 'bayesian-lora'"]),
            (["--preset", "papper"], ["no preset 'papper'", "did you mean 'paper'"]),
            (["--model", "smolm2"], ["unknown model 'smolm2'", "did you mean 'smollm2'"]),
            (["--model", "./nowhere"], ["'./nowhere': no such directory"]),
            (["--task", "arc-easy", "--data-dir", "nowhere"], ["nowhere: no such directory", "--data-dir"]),
            (["--max-tokens", "10"], ["'q0'", "24 tokens", "at most 10"]),
            (["--max-tokens", "1"], ["max_tokens is 1", "at least 2"]),
            (["--targets", "nothing"], ["nothing", "q_proj"]),
            (["--targets"], ["targets is empty"]),
            (["--layers", "last:99"], ["last:99", "3 layers", "at most last:3"]),
            (["--layers", "last:0"], ["last:0", "K of at least 1"]),
            (["--layers", "first:1"], ["first:1", "last:K"]),
            (["--cache-trunk"], ["no trunk to keep", "--layers last:K"]),
            (["--report-to", "tensorbord"], ["unknown tracker", "did you mean 'tensorboard'"]),
            (["--device", "cuda:99"], ["cuda:99"]),
            (["--device", "gpu"], ["unknown device 'gpu'", "cuda"]),
            (["--dtype", "int8"], ["int8", "float32"]),
            (["--revision", "main"], ["revision 'main'"]),
            (["--scoring", "letters"], ["letters", "'text', 'letter'"]),
            (["--schedule", "step"], ["step", "cosine"]),
            (["--kl-scaling", "none"], ["none", "elbo"]),
            (["--rate-multipliers", "foo=1"], ["'foo'", "flow"]),
            (["--rate-multipliers", "flow"], ["'flow' is not NAME=VALUE"]),
            (["--rate-multipliers", "flow=fast"], ["rate_multipliers flow is", "fast"]),
            (["--rate-multipliers", "flow=-1"], ["rate_multipliers flow is -1"]),
            (["--settings", "flow_dept=0"], ["'flow_dept'", "did you mean 'flow_depth'"]),
            (["--settings", "flow_depth=-1"], ["flow_depth", "-1"]),
            (["--settings", "flow_depth=deep"], ["flow_depth is 'deep'", "give a whole number"]),
            (["--settings", "flow_depth"], ["'flow_depth' is not NAME=VALUE"]),
            (["--milestones", "x"], ["--milestones", "'x'"]),
            (["--seed", str(2**64)], ["seed", "below 2^64"]),
            (["--epoch", "3"], ["--epoch", "--epochs", "bayeslora train --help"]),
            (["--colour", "red"], ["--colour"]),
        ],
        lambda case: (
            case[0][0] not in ("--layers", "--schedule", "--scoring", "--kl-scaling", "--milestones", "--seed")
            and case[0][0] not in ("--rate-multipliers", "--settings", "--dtype", "--max-tokens", "--colour")
        ),
    ),
)
def test_bad_options_are_refused_in_one_line(
    words: list[str], reasons: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bayeslora(*options(tmp_path, *words)) == 2
    err = refusal(capsys)
    assert all(reason in err for reason in reasons), err
    assert contents(tmp_path) == {}


COUNTS = ["epochs", "batch-size", "micro-batch", "draws", "eval-every", "rank", "max-train", "batch-tokens"]
SHARES = ["warmup", "label-smoothing", "kl-warmup"]
NUMBERS = ["learning-rate", "weight-decay", "kl-beta", "clip", "alpha", "checkpoint-seconds"]


@pytest.mark.parametrize(
    "option, value",
    some(
        [
            *((name, "-1") for name in [*COUNTS, *SHARES, *NUMBERS, "seed", "samples", "patience", "milestones"]),
            *((name, "0") for name in [*COUNTS, "learning-rate", "clip", "alpha"]),
            *((name, "nan") for name in [*SHARES, *NUMBERS]),
            *((name, "many") for name in ("epochs", "rank", "warmup", "clip", "seed")),
            *(("rank", "2.5"), ("epochs", "2.5"), ("warmup", "1"), ("label-smoothing", "1")),
        ],
        lambda case: case[0] in ("epochs", "warmup", "clip", "milestones"),  # of each kind of number one
    ),
)
def test_impossible_numbers_are_refused_in_one_line(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bayeslora(*options(tmp_path, f"--{option}", value)) == 2
    err = refusal(capsys)
    assert option.replace("-", "_") in err.replace("-", "_") and value.strip("-0.") in err
    assert contents(tmp_path) == {}


NO_ANSWER = {"question": "Is it?", "choices": ["yes", "no"]}
WRONG_ANSWER = {"question": "Is it?", "choices": ["yes", "no"], "answer": "perhaps"}


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_question_without_answer_is_found_before_training(
    split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tiny.write_task(tmp_path / "task", **{split: [question(1), NO_ANSWER]})
    assert bayeslora(*options(tmp_path / "run", "--task", task)) == 2
    err = refusal(capsys)
    assert not (tmp_path / "run").exists()
    assert f"{split} split" in err and f"{task / split}.jsonl, line 2: item" in err
    assert "has no answer" in err and "Is it?" in err


@pytest.mark.parametrize("split", ["validation", "test"])
def test_an_answer_that_is_no_choice_is_found_before_training(
    split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tiny.write_task(tmp_path / "task", **{split: [question(1), WRONG_ANSWER]})
    assert bayeslora(*options(tmp_path / "run", "--task", task)) == 2
    err = refusal(capsys)
    assert f"{task / split}.jsonl, line 2" in err and "'perhaps'" in err and "A, B" in err


def test_bad_training_questions_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [question(1), question(2), question(2), question(3), WRONG_ANSWER]
    task = tiny.write_task(tmp_path / "task", train=rows)
    assert bayeslora(*options(tmp_path / "run", "--task", task, "--json")) == 0
    out, err = capsys.readouterr()
    left_out = {"answer is not among the choices": 1, "duplicate": 1}
    assert json.loads(out)["counts"]["train"] == {"questions": 3, "left_out": left_out}
    assert err == ""  # --quiet


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_an_empty_split_is_found_before_training(
    split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tiny.write_task(tmp_path / "task", **{split: []})
    assert bayeslora(*options(tmp_path / "run", "--task", task)) == 2
    assert f"task {split}: has no questions" in refusal(capsys)


def test_a_file_too_small_to_divide_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = write_lines(tmp_path / "two.jsonl", [question(1), question(2)])
    assert bayeslora(*options(tmp_path / "run", "--task", task)) == 2
    assert "too few to divide" in refusal(capsys)


@pytest.mark.parametrize("place", ["own", "benchmark"])
def test_truncated_data_are_refused_by_name(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data" / "arc_easy"
    rows = [question(k) if place == "own" else choice_row(k) for k in range(60)]
    for split in ("train", "validation", "test"):
        write_lines(folder / f"{split}.jsonl.gz", rows)
    file = folder / "train.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-40])
    words = ["--task", folder] if place == "own" else ["--task", "arc-easy", "--data-dir", folder.parent]
    assert bayeslora(*options(tmp_path / "run", *words)) == 2
    assert f"{file}: is not a complete gzip file" in refusal(capsys)
    file.write_bytes(gzip.compress(b"\xff\xfe"))
    assert bayeslora(*options(tmp_path / "run", *words)) == 2
    assert "is not UTF-8" in refusal(capsys)


def test_labels_of_several_tokens_cannot_be_scored_by_letter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [question(k, labels=["first", "second", "third"][: 2 + k % 2], answer="first") for k in range(3)]
    task = tiny.write_task(tmp_path / "task", validation=rows)
    assert bayeslora(*options(tmp_path / "run", "--task", task, "--scoring", "letter")) == 2
    err = refusal(capsys)
    assert "'q0'" in err and "'text'" in err


def test_a_tracker_that_is_not_installed_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
    assert bayeslora(*options(tmp_path, "--report-to", "wandb")) == 2
    assert "pip install wandb" in refusal(capsys)


# Output ---------------------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_process_of_its_own_is_quiet_and_speaks_json(tmp_path: Path) -> None:
    """Warnings and progress of all libraries included."""
    command = [sys.executable, "-m", "bayeslora", *options(tmp_path / "run", "--json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    assert json.loads(done.stdout) == read_json(tmp_path / "run" / "result.json")


def test_progress_goes_to_stderr_and_metrics_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora(*(word for word in options(tmp_path) if word != "--quiet")) == 0
    out, err = capsys.readouterr()
    metrics = read_json(tmp_path / "result.json")["metrics"]
    about, *table, said, place = out.splitlines()
    assert about == "test split, 8 questions; in brackets: 95 % intervals"
    assert {line.split()[0]: line.split()[1] for line in table} == {name: f"{it:.4f}" for name, it in metrics.items()}
    sure, right = (f"{metrics[name]:.0%}" for name in ("confidence", "acc"))
    assert said == f"It says it is {sure} sure on average, and is right in {right} of the answers."
    assert "training: 0 %" in err and "training: 100 %" in err and "epoch 2/2: train nll" in err
    assert str(tmp_path) in place


def test_a_command_that_is_told_works_for_a_path_with_spaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(tiny.finished(), tmp_path / "my run")
    assert bayeslora(*options(run)) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    _, *words = shlex.split(told[told.index("(bayeslora") + 1 : told.index(" shows")])
    assert words == ["report", str(run)] and bayeslora(*words) == 0


def test_an_empty_text_is_not_classified(capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("predict", tiny.finished(), "--text", " \u200b") == 2
    assert refusal(capsys) == "bayeslora: the text is empty; give one with words\n"


def test_what_metrics_are_of_is_told_to_people_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("evaluate", tiny.finished(), "--task", tiny.task_directory(), "--split", "validation")
    assert bayeslora(*words) == 0
    about, *rest = capsys.readouterr().out.splitlines()
    assert about == "validation split, 10 questions; in brackets: 95 % intervals"
    assert bayeslora(*words, "--quiet") == 0
    assert capsys.readouterr().out.splitlines() == rest
    assert bayeslora(*words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["split"] == "validation"


def test_metrics_of_texts_are_of_texts_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"test": {"texts": 1, "tokens": 2}}
    print_result(RunResult(config={}, metrics={"nll": 1.0}, counts=counts, solutions=3))
    assert capsys.readouterr().out == "test split, 1 text, 2 tokens, 3 written answers\nnll                1.0000\n"


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--model", "m", "--task", "urnss", "--out", "run"],
        ["compare", "--model", "m", "--tasks", "urns", "urnss", "--methods", "lora", "--out", "run"],
        ["ablate", "flow-depth", "--model", "m", "--task", "urnss", "--out", "run"],
        ["ablate", "flow", "--model", "m", "--task", "urns", "--out", "run"],
        ["tune", "--model", "m", "--task", "urnss", "--out", "run"],
        ["train", "--model", "m", "--task", "urns", "--method", "lorra", "--out", "run"],
        ["compare", "--model", "m", "--tasks", "urns", "--methods", "swag", "lorra", "--out", "run"],
        ["tune", "--model", "m", "--task", "urns", "--method", "lorra", "--out", "run"],
        ["evaluate", "RUN", "--task", "urnss"],
        ["calibrate", "RUN", "--task", "urnss"],
        ["cascade", "RUN", "--second", "RUN", "--task", "urnss"],
    ],
)
def test_a_misspelt_name_is_told_before_anything_heavy_is_imported(words: list[str], tmp_path: Path) -> None:
    given = [tiny.finished().as_posix() if word == "RUN" else word for word in words]
    code = (
        f"import sys\nfrom bayeslora.cli import main\ntry: main({given!r})\n"
        "except SystemExit as end: print(end.code, sys.modules.keys() & {'torch', 'transformers'})"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert done.stdout == "2 set()\n" and not list(tmp_path.iterdir())
    told = (
        "unknown task 'urnss' (did you mean 'urns'?)",
        "unknown method 'lorra' (did you mean 'lora'?)",
        "ablation 'flow'",
    )
    assert any(it in done.stderr for it in told)


@pytest.mark.system
def test_a_misspelt_method_or_preset_is_told_before_the_model_libraries_are_imported(tmp_path: Path) -> None:
    words = ["--model", "m", "--task", "urns", "--out", "run"]
    code = (
        "import sys\nfrom bayeslora.cli import main\nfor given in (['--method', 'lorra'], ['--preset', 'papre']):\n"
        f"    try: main(['train', *{words!r}, *given])\n"
        "    except SystemExit as end: print(end.code, sys.modules.keys() & {'transformers'})"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert done.stdout == "2 set()\n" * 2 and not list(tmp_path.iterdir())
    assert "did you mean 'lora'?" in done.stderr and "did you mean 'paper'?" in done.stderr


def test_a_finished_run_needs_its_data_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny.task_directory(), "mine")
    words = options(tmp_path / "run", "--task", "mine")
    assert bayeslora(*words) == 0
    shutil.rmtree("mine")
    assert bayeslora(*words) == 0


def test_own_data_are_told_to_be_what_they_were_taken_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "mine.jsonl", [question(k, source="a book") for k in range(30)])
    words = [word for word in options(tmp_path / "run", "--task", path) if word != "--quiet"]
    told = f"task: questions with choices in {path}; columns not used: source\n"
    assert bayeslora(*words, "--dry-run", "--tflops", 1) == 0 and capsys.readouterr().err.startswith(told)
    assert bayeslora(*words) == 0 and capsys.readouterr().err.count(told) == 1
    assert bayeslora(*words) == 0 and told not in capsys.readouterr().err  # it is done
    assert bayeslora(*words, "--task", "urns", "--dry-run", "--tflops", 1) == 0
    assert "task: " not in capsys.readouterr().err


def test_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("methods") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(METHODS)
    assert all("presets: default, paper" in line for line in lines)
    assert bayeslora("methods", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(METHODS) and all(row["description"] for row in rows)


@pytest.mark.system
def test_help_of_every_verb_imports_nothing_heavy() -> None:
    code = f"""
import sys
from bayeslora.cli import main
for verb in {sorted(cli.VERBS, key="train".__eq__)}:  # train comes last: its defaults are those of a method, which needs torch
    if verb == "train":
        print({{"torch", "numpy"}} & sys.modules.keys(), file=sys.stderr)
    try: main([verb, "--help"])
    except SystemExit as end: assert not end.code
print({{"transformers", "peft", "datasets", "matplotlib"}} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr.split() == ["set()", "set()"]
    for verb in cli.VERBS:
        assert f"usage: bayeslora {verb}" in done.stdout
    for word in ("--learning-rate", "--rate-multipliers", "--choice", "--error-rate", "--raw"):
        assert word in done.stdout


# Quickstart -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The quickstart with a tiny model and few urns; tells which models were loaded."""
    names: list[str] = []

    def load_tiny(name: str, **kwargs: Any) -> Any:
        names.append(name)
        return load_model(tiny.model_directory(), **kwargs)

    def config(method: str, seed: int) -> RunConfig:
        adapter = AdapterConfig(rank=2, layers="last:1")
        training = TrainingConfig(epochs=2, batch_size=4, cache_trunk=True)
        samples = PredictionConfig(samples=2)
        return run_config(method, task="urns", seed=seed, adapter=adapter, training=training, prediction=samples)

    monkeypatch.setattr(study, "load_model", load_tiny)
    monkeypatch.setattr(study, "quickstart_config", config)
    monkeypatch.setitem(TASKS, "urns", lambda data_dir: urns_task(sizes={"train": 8, "validation": 10, "test": 9}))
    with without_intervals():
        yield names


@pytest.mark.system
def test_quickstart_compares_both_methods_on_one_model(
    loads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = []
    fill = TrunkScorer._fill
    monkeypatch.setattr(TrunkScorer, "_fill", lambda self, items: (filled.append(len(items)), fill(self, items)))
    done = study.quickstart(tmp_path, report=PlainLines())
    assert loads == ["smollm2"]
    assert sum(filled) == 8 + 10 + 9  # once for both methods, all epochs and all draws
    assert list(done.results) == ["lora", "bayesian-lora"]
    assert done.figure.read_bytes().startswith(b"\x89PNG") and done.figure.parent == tmp_path
    for method, result in done.results.items():
        [row] = [line for line in done.text.splitlines() if line.startswith(f"{method} ")]
        shown = [float(word) for word in row.split()[1:]]
        columns = ("acc", "nll", "ece", "distance_to_truth")
        assert shown == pytest.approx([result["metrics"][name] for name in columns], abs=6e-4)
        assert (tmp_path / method / "adapter" / "adapter_model.safetensors").exists()
        assert str(tmp_path / method / "adapter") in done.text
    assert "9 urns" in done.text and f"{result['metrics']['truth_entropy']:.3f}" in done.text
    err = capsys.readouterr().err
    assert err.index("lora:") < err.index("bayesian-lora:")


@pytest.mark.system
def test_quickstart_goes_on_where_it_was_interrupted(loads: list[str], tmp_path: Path) -> None:
    first = study.quickstart(tmp_path)
    loads.clear()
    assert study.quickstart(tmp_path) == first and loads == []
    stays = contents(tmp_path / "lora")
    before = outcome(tmp_path / "bayesian-lora")
    (tmp_path / "bayesian-lora" / "result.json").unlink()
    again = study.quickstart(tmp_path)
    assert loads == ["smollm2"] and contents(tmp_path / "lora") == stays
    assert outcome(tmp_path / "bayesian-lora") == before
    assert again.results["lora"] == first.results["lora"]


@pytest.mark.system
def test_quickstart_refuses_other_settings_and_force_begins_again(
    loads: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bayeslora("quickstart", "--out", tmp_path, "--json", "--quiet") == 0
    out, err = capsys.readouterr()
    assert err == "" and list(json.loads(out)) == ["lora", "bayesian-lora"]
    before = contents(tmp_path)
    assert bayeslora("quickstart", "--out", tmp_path, "--seed", 1, "--quiet") == 2
    assert "seed is 0 there and 1 here" in refusal(capsys) and contents(tmp_path) == before
    assert bayeslora("quickstart", "--out", tmp_path, "--seed", 1, "--quiet", "--force") == 0
    out = capsys.readouterr().out
    assert "distance to truth" in out and "bayeslora predict" in out
    assert read_json(tmp_path / "lora" / "config.json")["seed"] == 1


@pytest.mark.system
def test_what_quickstart_proposes_next_works(loads: list[str], tmp_path: Path) -> None:
    text = study.quickstart(tmp_path).text
    commands = [shlex.split(line) for line in text[text.index("Next:") :].splitlines() if "bayeslora " in line]
    assert [words[1] for words in commands] == ["predict", "calibrate", "train"]
    for words in commands[:2]:
        last = max(k for k, word in enumerate(words) if word.startswith("--"))
        assert bayeslora(*words[1 : last + 2], "--quiet") == 0  # what stands behind explains it


@pytest.mark.slow
def test_bayesian_lora_is_better_calibrated_in_the_real_quickstart(tmp_path: Path) -> None:
    """The promise of the quickstart, for each of three seeds. Takes some 25 minutes on a small machine."""
    for seed in range(3):
        results = study.quickstart(tmp_path / str(seed), seed=seed).results
        lora, bayesian = (results[method]["metrics"] for method in ("lora", "bayesian-lora"))
        assert lora["truth_entropy"] < bayesian["nll"] < lora["nll"], (seed, lora, bayesian)
        assert bayesian["distance_to_truth"] < lora["distance_to_truth"], (seed, lora, bayesian)
