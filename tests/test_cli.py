from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import bayeslora
from bayeslora import cli
from bayeslora.cli.progress_bars import SWITCHES, spare_progress_bars
from bayeslora.errors import did_you_mean
from bayeslora.models import convert, locate
from bayeslora.runs.config import RunConfig, resolve
from bayeslora.tasks import TASKS
from models.ggufs import Recipe, tiny_model
from tiers import some


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Recipe().write(tiny_model("llama"), tmp_path / "tiny.gguf")


def _main(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


def _bayeslora(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bayeslora", *arguments], capture_output=True, text=True, timeout=60)


def test_help_teaches() -> None:
    answer = _bayeslora("--help")
    assert answer.returncode == 0 and answer.stderr == ""
    for word in ("quickstart", "train", "predict", "convert", "models", "tasks", "--version", "Exit codes"):
        assert word in answer.stdout


def test_the_list_of_verbs_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    before = {verb: verb.__doc__ for verb in cli.VERBS.values()}
    assert _main("--help") == 0
    listed = capsys.readouterr().out.partition("subcommands")[2]
    assert "Serve a run over HTTP" in listed and "curl" not in listed and "BoTorch" not in listed
    assert before == {verb: verb.__doc__ for verb in cli.VERBS.values()}
    assert _main("serve", "--help") == 0 and "curl" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom bayeslora.cli import main\ntry: main(['--help'])\n"
        "except SystemExit: print({'torch', 'transformers', 'numpy', 'rich'} & sys.modules.keys(), file=sys.stderr)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stderr.strip() == "set()"


def test_all_exit_codes_are_told() -> None:
    page = (Path(__file__).parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
    for text in (cli.DESCRIPTION, page):
        told = text[text.index("Exit codes:") :]
        assert all(str(code) in told for code in (0, 1, 2, 130, cli.CLOSED_PIPE))


@pytest.mark.parametrize(
    ("terminal", "arguments", "drawn"),
    [(True, [], True), (True, ["merge", "x", "--quiet"], False), (False, [], False)],
)
def test_libraries_draw_progress_bars_only_for_who_sees_them(
    terminal: bool, arguments: list[str], drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SWITCHES:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    spare_progress_bars(arguments)
    assert [os.environ.get(name) for name in SWITCHES] == [None if drawn else "1"] * len(SWITCHES)


def test_a_command_in_a_pipe_draws_none() -> None:
    code = (
        "from bayeslora.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
        "from tqdm import tqdm\nfor _ in tqdm(range(2)): pass"
    )
    given = {name: it for name, it in os.environ.items() if name not in SWITCHES}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=given)
    assert answer.stderr == ""


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "arguments",
    some([["--help"], ["--version"], ["train", "--help"], ["methods", "--json"]], [["--help"], ["--version"]]),
)
def test_a_closed_pipe_ends_the_process_silently(arguments: list[str], *, buffered: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    given = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    command = [sys.executable, "-m", "bayeslora", *arguments]
    try:
        answer = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=given, timeout=60, check=False)
    finally:
        os.close(writer)
    assert (answer.returncode, answer.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", [["--help"], ["nonsense"]])
def test_so_does_one_for_both_streams(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "bayeslora", *arguments]
    try:
        answer = subprocess.run(command, stdout=writer, stderr=writer, timeout=60, check=False)
    finally:
        os.close(writer)
    assert answer.returncode == 141


def test_another_broken_pipe_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: object) -> None:
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr(cli.Tasks, "run", broken)
    assert _main("tasks") == 1 and capsys.readouterr().err == "bayeslora: of a worker\n"


@pytest.mark.parametrize("verb", ["convert", "models", "tasks"])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(verb, "--help") == 0
    assert f"usage: bayeslora {verb}" in capsys.readouterr().out


def test_help_is_plain_and_leaves_no_trace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sentences, without the line breaks of the source; kinds and defaults without None."""
    monkeypatch.setenv("COLUMNS", "100")
    before = {verb: get_type_hints(verb, include_extras=True) for verb in cli.VERBS.values()}
    for verb in cli.VERBS:
        assert _main(verb, "--help") == 0
        shown = capsys.readouterr().out
        assert "None}" not in shown and "default: None" not in shown and "(default: )" not in shown
    assert before == {verb: get_type_hints(verb, include_extras=True) for verb in cli.VERBS.values()}
    assert _main("train", "--help") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert (
        "--max-train INT Use only this many training questions (blocks of text, problems), chosen at random, the"
        in shown
    )
    assert "--bits {4,8}" in shown and "--milestones [INT [INT ...]]" in shown and "(default: 0.0007)" in shown
    assert _main("train", "--epochs", "x", "--model", "m", "--task", "t", "--out", "o") == 2
    assert "--epochs: 'x' is not INT" in capsys.readouterr().err


def test_the_command_in_the_help_of_serve_can_be_copied(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert _main("serve", "--help") == 0
    shown = capsys.readouterr().out
    command = shown[shown.index("curl ") :].split("\n\n")[0]
    url, *words = shlex.split(command.replace("\\\n", " "))[1:]
    assert url == "http://127.0.0.1:8000/v1/choices"
    assert words[:-1] == ["-H", "Content-Type: application/json", "-d"]
    assert set(json.loads(words[-1])) == {"question", "choices"}


@pytest.mark.parametrize("choices", [[], ["--choice", "a"]])
def test_a_question_without_choices_is_told_the_verb_for_free_text(
    choices: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main("predict", str(tmp_path / "my run"), "--question", "Which?", *choices) == 2
    told = capsys.readouterr().err
    assert f"the question has {'1 choice' if choices else '0 choices'}; give --choice at least twice" in told
    command = told[told.index("bayeslora generate") :].strip()
    assert shlex.split(command)[1:] == ["generate", str(tmp_path / "my run"), "--confidence", "--prompt", "Which?"]


def test_no_argument_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main() == 0
    assert "usage: bayeslora" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("--version") == 0
    assert capsys.readouterr().out == f"bayeslora {bayeslora.__version__}\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            ["convrt"],
            ["convrt", "quickstart, train, evaluate", "compare, ablate, tune", "tasks, methods, models, convert"],
        ),
        (["help", "convrt"], ["there is no verb 'convrt' (did you mean 'convert'?); choose quickstart, train"]),
        (["convert"], ["FILE.gguf", "DIRECTORY", "bayeslora convert --help"]),
        (["convert", "a.gguf"], ["DIRECTORY"]),
        (["convert", "a.gguf", "b", "c"], ["c"]),
        (["train", "--model", "m"], ["bayeslora: missing: --out PATH, --task STR; see bayeslora train --help\n"]),
        (["compare", "--out", "x"], ["missing: --model STR, --tasks STR ...; see bayeslora compare --help\n"]),
        (["evaluate"], ["bayeslora: missing: DIR; see bayeslora evaluate --help\n"]),
        (["models", "--epochs", "3"], ["bayeslora: --epochs is no option of models; see bayeslora models --help\n"]),
        (["models", "--force"], ["bayeslora: --force is no option of models; see bayeslora models --help\n"]),
        (["models", "--zzz"], ["bayeslora: unknown: --zzz; see bayeslora models --help\n"]),
        (["models", "--jso"], ["bayeslora: unknown: --jso; did you mean --json?; see bayeslora models --help\n"]),
        (["convert", "missing.gguf", "out"], ["missing.gguf: no such file"]),
    ],
)
def test_bad_input_is_one_line_and_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("bayeslora: ")
    assert all(word in err for word in words)
    assert not set("│─╭╰\x1b") & set(err)


@pytest.mark.parametrize(
    "given, told",
    [
        (["--epochs", "x"], "--epochs: 'x' is not INT"),
        (["--rank", "x"], "--rank: 'x' is not INT"),
        (["--milestones", "a"], "--milestones: 'a' is not INT"),
        (["--tflops", "fast"], "--tflops: 'fast' is not FLOAT"),
        (["--scoring", "word"], "--scoring: 'word' is not one of 'text', 'letter'"),
        (["--settings", "flow"], "--settings: 'flow' is not NAME=VALUE"),
        (["--dtype"], "--dtype needs a value"),
        (["--modle", "m"], "unknown: --modle"),
        (["--lr", "1e-3"], "unknown: --lr, 1e-3; did you mean --learning-rate?"),
        (["--bs", "4"], "unknown: --bs, 4; did you mean --batch-size?"),
    ],
)
def test_mistakes_are_told_in_a_few_words(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("train", "--model", "m", "--task", "t", "--out", "o", *given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bayeslora: {told}") and line.endswith("; see bayeslora train --help")


def test_initials_are_recognised_where_more_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("train", "--model", "m", "--lr", "1") == 2
    assert "; unknown: --lr 1; did you mean --learning-rate?; see bayeslora train --help\n" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", some(["utf-8", "ascii"], ["ascii"]))
def test_the_line_is_the_same_in_every_encoding(encoding: str) -> None:
    command = [sys.executable, "-m", "bayeslora", "convrt"]
    answer = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding}, timeout=60)
    assert answer.returncode == 2
    assert answer.stderr.decode() == (
        f"bayeslora: there is no verb 'convrt' (did you mean 'convert'?); choose {', '.join(cli.VERBS)}, or see bayeslora "
        "--help\n"
    )


@pytest.mark.system
def test_help_in_ascii() -> None:
    command = [sys.executable, "-m", "bayeslora", "--help"]
    subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, timeout=60, check=True)


def test_convert(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    assert _main("convert", source, target) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{target}: ") and out.count("\n") == 1
    assert err.splitlines() == [f"converting tiny.gguf: {percent} %" for percent in (0, 25, 50, 75, 100)]
    assert set(os.listdir(target)) == set(convert.FILES)

    assert _main("convert", source, target) == 2
    assert "not empty; choose another one, or replace it with --force" in capsys.readouterr().err

    assert _main("convert", source, target, "--force", "--quiet") == 0
    assert capsys.readouterr() == ("", "")

    assert _main("convert", source, target, "--force", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["directory"] == str(target) and result["bytes"] > 0 and result["seconds"] >= 0


def test_a_full_disk_is_a_failure_in_one_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "save_file", full)
    assert _main("convert", source, tmp_path / "out", "--quiet") == 1
    assert capsys.readouterr().err == "bayeslora: [Errno 28] No space left on device\n"
    assert os.listdir(tmp_path) == ["tiny.gguf"]


def test_ctrl_c_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(convert, "save_file", lambda *args, **options: os.kill(os.getpid(), signal.SIGINT))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background ignore it
    try:
        assert _main("convert", source, tmp_path / "out", "--quiet") == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert capsys.readouterr().err == "bayeslora: interrupted\n"
    assert os.listdir(tmp_path) == ["tiny.gguf"]


@pytest.mark.parametrize("library", ["contextlib", "tyro", "bayeslora.cli.runs"])
def test_ctrl_c_while_libraries_are_imported_is_one_line(library: str) -> None:
    code = f"""
import sys

class Interrupted:
    def find_spec(name, *more):
        if name == {library!r}:
            raise KeyboardInterrupt

import bayeslora
sys.modules.pop({library!r}, None)
sys.meta_path.insert(0, Interrupted)
import bayeslora.cli
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "bayeslora: interrupted\n")


@pytest.mark.parametrize(
    ("words", "resumes"),
    [
        (["train"], True),
        (["predict", "run", "--output", "x"], True),
        (["predict", "run", "--output=x"], True),
        (["predict", "run"], False),
        (["evaluate"], False),
    ],
)
def test_an_interruption_tells_whether_the_same_command_resumes(
    words: list[str], resumes: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parse", interrupted)
    assert cli._run(words) == 130
    assert capsys.readouterr().err == f"bayeslora: interrupted{'; the same command resumes' if resumes else ''}\n"


def test_a_terminal_gets_a_bar(source: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "bayeslora", "convert", source, tmp_path / "out"]
    process = subprocess.Popen(command, stderr=theirs, stdout=subprocess.PIPE, env=os.environ | {"TERM": "xterm"})
    out, _ = process.communicate(timeout=60)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert process.returncode == 0 and b"written in" in out
    assert "converting tiny.gguf" in shown and "━" in shown


def test_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    there = locate.Builtin("a good one", "pip install good", find=lambda: Path("x"), directory=lambda: Path("x"))
    absent = locate.Builtin("a far one", "pip install far", find=lambda: None, directory=lambda: Path("x"))
    for name, builtin in (("good", there), ("far", absent)):
        monkeypatch.setitem(locate.BUILTINS, name, builtin)
    assert _main("models") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("smollm2  SmolLM2-135M-Instruct")
    assert lines[1:] == [
        "good     a good one  [installed]",
        "far      a far one  [not installed; run: pip install far]",
    ]
    assert _main("models", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["far"] == {"name": "far", "description": "a far one", "installed": False, "install": "pip install far"}


def test_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("tasks") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(TASKS)
    assert _main("tasks", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == set(TASKS) and all(row["description"] for row in rows)


@pytest.mark.parametrize("verb", ["train", "predict", "evaluate", "export", "compare"])
def test_a_name_that_is_no_text_is_refused_in_one_line(verb, capsys):
    """As Python gives the bytes of a file's name that are not UTF-8."""
    assert cli._run([verb, os.fsdecode(b"bad\xffname")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "bayeslora: bad\ufffdname: is not UTF-8; rename it\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems take no such names")
def test_so_is_a_working_directory(tmp_path, monkeypatch, capsys):
    place = tmp_path / os.fsdecode(b"bad\xffname")
    place.mkdir()
    monkeypatch.chdir(place)
    assert cli._run(["tasks"]) == 2
    assert "is not UTF-8; rename it" in capsys.readouterr().err


def test_more_draws_than_memory_can_hold_are_refused_before_anything_is_loaded(tmp_path, capsys):
    words = ["predict", str(tmp_path / "no run"), "--question", "a", "--choice", "b", "--choice", "c"]
    assert cli._run([*words, "--samples", "1000000000"]) == 2
    assert (
        "samples is 1000000000; give 0 for the posterior mean, or a number of draws up to 1024"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_runs_out_is_one_line(error, monkeypatch, capsys):
    def fail(self):
        raise error

    monkeypatch.setattr(cli.Tasks, "run", fail)
    assert cli._run(["tasks"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("bayeslora: out of memory") and err.count("\n") == 1


def test_a_misspelt_verb_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("trian") == 2
    assert capsys.readouterr().err.startswith(
        "bayeslora: there is no verb 'trian' (did you mean 'train'?); choose quick"
    )


def test_help_of_a_verb_in_two_ways(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for words in (("help", "evaluate"), ("evaluate", "--help")):
        assert _main(*words) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and "usage: bayeslora evaluate" in told[0]
    assert _main("help") == 0
    assert "Start here:" in capsys.readouterr().out


def test_a_part_of_a_name_is_enough_to_be_told_the_rest() -> None:
    assert did_you_mean("arc", ["boolq", "arc-easy", "arc-challenge"]) == " (did you mean 'arc-easy'?)"
    assert did_you_mean("ar", ["arc-easy"]) == "" and did_you_mean("xyz", ["arc-easy"]) == ""


def test_public_names_are_listed() -> None:
    assert set(bayeslora.__all__) < set(dir(bayeslora)) and all(hasattr(bayeslora, name) for name in bayeslora.__all__)


@pytest.mark.parametrize("verb", ["predict", "evaluate", "calibrate", "generate", "export", "merge", "serve"])
def test_a_wrong_directory_is_told_before_anything_is_imported(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bayeslora.runs.load", None)
    more = {
        "predict": ["--question", "a", "--choice", "b", "--choice", "c"],
        "generate": ["--prompt", "a"],
        "export": ["--out", tmp_path / "out"],
        "merge": ["--out", tmp_path / "out"],
    }.get(verb, [])
    assert _main(verb, str(tmp_path / "nowhere"), *map(str, more)) == 2
    assert "nowhere: no such directory" in capsys.readouterr().err
    assert _main(verb, str(tmp_path), *map(str, more)) == 2
    assert "holds no run that can be used" in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert _main(verb, "no-such-org/run", *map(str, more)) == 2  # may be an id on the hub
    assert "no-such-org/run: is no directory here, and no adapter could be loaded" in capsys.readouterr().err


def test_the_help_of_train_has_examples_and_the_defaults_of_the_method(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = {}
    for method in ("lora", "blob"):
        assert _main("train", "--method", method, "--help") == 0
        shown[method] = capsys.readouterr().out
        rates = {name: resolve(RunConfig.of("m", "t", method=name)).training.learning_rate for name in (method,)}
        assert f"Learning rate of AdamW. (default: {rates[method]})" in shown[method]
    assert "bayeslora train --model smollm2 --task arc-easy --out run" in shown["lora"]
    assert _main("train", "--method", "lra", "--help") == 2
    assert "unknown method 'lra'" in capsys.readouterr().err
