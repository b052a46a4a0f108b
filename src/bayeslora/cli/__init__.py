"""The command line: only the verbs; other packages do the work.

A verb is a dataclass: its fields are the options (tyro reads them) and ``run`` does the job. Exit codes: 0 done, 2 bad
input with one line on stderr, 1 a real failure, 141 if nobody reads the output any longer. Nothing heavy is imported before a
verb runs.
"""

from __future__ import annotations

# first, so that the other imports may be interrupted
from bayeslora.cli.interruption import INTERRUPTED  # isort: split

import contextlib
import inspect
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import tyro
from tyro.extras import SubcommandApp

from bayeslora import __version__
from bayeslora.cli.ablate import Ablate
from bayeslora.cli.ask import Generate, Predict
from bayeslora.cli.cascade import Cascade
from bayeslora.cli.common import Verb
from bayeslora.cli.export import Convert, Export, Merge, Push
from bayeslora.cli.help_texts import dataclasses_of, plain_help, short_descriptions
from bayeslora.cli.lists import Methods, Models, Tasks
from bayeslora.cli.measure import Bench
from bayeslora.cli.parsing import one_line, with_initials
from bayeslora.cli.pipes import CLOSED_PIPE, reader_left
from bayeslora.cli.progress_bars import spare_progress_bars
from bayeslora.cli.report import Report
from bayeslora.cli.runs import Calibrate, Compare, Evaluate, Quickstart, Train
from bayeslora.cli.search import Tune
from bayeslora.cli.serve import Serve
from bayeslora.cli.settings_file import defaults_of_train, with_pairs
from bayeslora.errors import InputError, did_you_mean, first_line, out_of_memory
from bayeslora.train.errors import RunsFailed, TrainingDiverged

DESCRIPTION = """Fine-tuned language models that know what they do not know.

Start here:
    bayeslora quickstart                                        the whole job in minutes, on any machine
    bayeslora train --model M --task T --out DIR                one run
    bayeslora evaluate DIR --task T                             how good it is
    bayeslora calibrate DIR --error-rate 0.1                    when it should not answer
    bayeslora predict DIR --question Q --choice A --choice B    ask it
    bayeslora generate DIR --prompt TEXT                        let it write
    bayeslora serve DIR                                         answers and text over HTTP
    bayeslora cascade DIR --second DIR2                         two models share the questions
    bayeslora compare --model M --tasks T ... --out DIR         all methods in one table
    bayeslora ablate NAME --model M --task T --out DIR          what one setting of Bayesian-LoRA does
    bayeslora tune --model M --task T --out DIR                 good settings, by Bayesian optimisation
    bayeslora report DIR                                        one page on a run or a study, with figures and tables
    bayeslora bench train predict memory                        time and memory against PEFT's LoRA
    bayeslora export DIR --out DIR2                             its draws as LoRA adapters, to be served by vLLM
    bayeslora merge DIR --out DIR2                              its mean as an ordinary model
    bayeslora push DIR ORG/NAME                                 its adapter on the hub, with a model card
    bayeslora tasks | methods | models                          what there is
    bayeslora help VERB                                         all options of a verb
    bayeslora --tyro-print-completion bash                      completion for bash, zsh or tcsh
    bayeslora --version

A task is a name, a file of your own (.jsonl, .csv, .parquet, or .txt for plain text), or a data set of the hub. The fields of
its rows say what is learnt, such as {"question": ..., "choices": [...], "answer": ...}; see bayeslora train --help.

A model is given as the name of a built-in one, a directory in Hugging Face format, or a hub id such as org/model.

Exit codes: 0 done, 1 failure, 2 bad input (one line on stderr says what to do), 130 interrupted, 141 if
nobody reads the output any longer (as with | head)."""

RESUMED = ("quickstart", "train", "compare", "ablate", "tune")
"""Verbs that go on where they were interrupted; ``predict`` does so if it writes a file."""

VERBS: dict[str, type[Verb]] = {
    "quickstart": Quickstart,
    "train": Train,
    "evaluate": Evaluate,
    "calibrate": Calibrate,
    "predict": Predict,
    "generate": Generate,
    "serve": Serve,
    "cascade": Cascade,
    "compare": Compare,
    "ablate": Ablate,
    "tune": Tune,
    "report": Report,
    "bench": Bench,
    "export": Export,
    "merge": Merge,
    "push": Push,
    "tasks": Tasks,
    "methods": Methods,
    "models": Models,
    "convert": Convert,
}

app = SubcommandApp()
for _name, _verb in VERBS.items():
    app.command(_verb, name=_name)  # type: ignore[call-overload]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # paths or tyro's bullets may not fit the terminal's encoding
    arguments = sys.argv[1:] if arguments is None else arguments
    spare_progress_bars(arguments)
    try:
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # rather than when the interpreter ends, which would report a closed pipe
    except OSError as error:  # of writing to stdout or stderr
        code = _failed(error)
    sys.exit(code)


def _run(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--version"]:
        print(f"bayeslora {__version__}")
        return 0
    try:
        _require_text(arguments)
        verb = parse(_with_help(arguments))
        with _hushed() if getattr(verb, "quiet", False) else contextlib.nullcontext():
            verb.run()
    except SystemExit as end:  # after the help
        return int(end.code or 0)
    except InputError as error:
        return _complain(error, 2)
    except (OSError, ArithmeticError, TrainingDiverged, RunsFailed) as error:
        return _failed(error)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _complain(
            f"out of memory ({first_line(error)}); use fewer --samples, a smaller batch or fewer tokens", 1
        )
    except KeyboardInterrupt:
        return _complain("interrupted; the same command resumes" if _resumes(arguments) else "interrupted", INTERRUPTED)
    return 0


def _resumes(arguments: Sequence[str]) -> bool:
    """Whether the same command goes on where it was interrupted."""
    if arguments[:1] == ["predict"]:
        return any(word.partition("=")[0] == "--output" for word in arguments)
    return bool(arguments) and arguments[0] in RESUMED


def _with_help(arguments: Sequence[str]) -> Sequence[str]:
    """Arguments with ``help VERB`` as ``VERB --help``, and the help where there are none; a misspelt verb is refused."""
    if not arguments:
        return ["--help"]
    if arguments[0] == "help":
        arguments = [*arguments[1:2], "--help"]
    first = arguments[0]
    if first not in VERBS and not first.startswith("-"):
        raise InputError(
            f"there is no verb {first!r}{did_you_mean(first, VERBS)}; choose {', '.join(VERBS)}, or see bayeslora --help"
        )
    return arguments


def _require_text(arguments: Sequence[str]) -> None:
    """Refuse file names that are not valid text: safetensors and JSON cannot store them, and would only fail later."""
    for name in (str(Path.cwd()), *arguments):
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = name.encode(errors="surrogateescape").decode(errors="replace")
            raise InputError(f"{shown}: is not UTF-8; rename it") from None


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Suppress warnings of libraries inside the block."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _complain(error: object, code: int) -> int:
    print(f"bayeslora: {' '.join(str(error).splitlines())}", file=sys.stderr)
    return code


def _failed(error: Exception) -> int:
    """The exit code of a failure, which is told unless nobody reads it."""
    left = isinstance(error, BrokenPipeError) and reader_left()
    return CLOSED_PIPE if left else _complain(error, 1)


def _shown_plainly(arguments: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """A block in which help is plain: that of a verb, if it is asked for, or the list of verbs."""
    if not arguments or arguments[0] not in VERBS:
        return short_descriptions(VERBS.values())
    asked = not {"-h", "--help"}.isdisjoint(arguments)
    return plain_help(VERBS[arguments[0]]) if asked else contextlib.nullcontext()


def parse(arguments: Sequence[str]) -> Verb:
    """Parse a verb with its options. tyro reports mistakes in a box, which is reduced to one line here."""
    complaint = io.StringIO()
    defaults = defaults_of_train(arguments[1:]) if arguments[:1] == ["train"] else None
    try:
        with contextlib.redirect_stderr(complaint), _shown_plainly(arguments):
            if defaults is not None:
                about = inspect.getdoc(Train)
                given = tyro.cli(Train, prog="bayeslora train", description=about, default=defaults, args=arguments[1:])
                return with_pairs(given, defaults)
            verb: Verb = app.cli(prog="bayeslora", description=DESCRIPTION, args=arguments)
    except SystemExit as end:
        if end.code:
            verb_help = " ".join(["bayeslora", *(word for word in arguments[:1] if word in VERBS), "--help"])
            told = one_line(complaint.getvalue()).replace("bayeslora --help", verb_help)
            raise InputError(with_initials(told, _options(arguments))) from None
        raise
    return verb


def _options(arguments: Sequence[str]) -> list[str]:
    """Names of the options of the verb, as they are written."""
    owners = dataclasses_of(VERBS[arguments[0]]) if arguments and arguments[0] in VERBS else []
    return [field.name.replace("_", "-") for owner in owners for field in fields(owner)]
