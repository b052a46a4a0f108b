"""Verbs that query a trained model."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import UseAppendAction

from bayeslora.cli.collector import collector_paused, spare_collector_at_exit
from bayeslora.cli.common import OfDraws, quoted
from bayeslora.cli.lazy_library import import_lazily
from bayeslora.errors import InputError
from bayeslora.number_checks import check_number
from bayeslora.runs.config import check_samples
from bayeslora.server.announcement import announced
from bayeslora.server.resident import ask_resident, ensure_resident
from bayeslora.train.errors import RunsFailed
from bayeslora.wording import counted

if TYPE_CHECKING:
    from bayeslora.predict.calibrate import Calibration
    from bayeslora.predict.generation.confidence import WrittenAnswer
    from bayeslora.runs.trained import TrainedModel
    from bayeslora.server.announcement import Served
    from bayeslora.tasks import Item

NOT_OF_ANSWER = ("model", "draws", "level", "deterministic")
"""Fields of a server's reply that a printed answer does not have."""


@dataclass(frozen=True, kw_only=True)
class Predict(OfDraws):
    """Probabilities over the choices of a question, and whether the model is sure enough to answer."""

    question: str | None = None
    """The question."""
    choice: UseAppendAction[tuple[str, ...]] = ()
    """A choice; give the option once for each."""
    text: str | None = None
    """A text to classify, for runs that were trained on texts with labels."""
    passage: str = ""
    """Passage that the question refers to."""
    bare: bool = False
    """Use the question as it is, without the prompt template of benchmarks: for runs trained that way, such as on urns."""
    input: Path | None = None
    """A file (.jsonl, .csv, .parquet) with questions and choices, of any length; answers are JSON lines in the same order. For
    runs that were trained on texts with labels, a row may have a text instead."""
    output: Path | None = None
    """File for the answers to --input. If interrupted, the same command resumes. Without it answers are printed."""
    level: float = 0.9
    """Coverage of the prediction set: how often it contains the right choice. Needs a calibrated run, and is 0.5, 0.8, 0.9, 0.95
    or 0.99; the last two need at least 19 and 99 questions to calibrate on."""
    raw: bool = False
    """Ignore the calibration of the run."""
    force: bool = False
    """Replace an existing output."""
    stay: float | None = None
    """Keep the model in memory, in a server for you alone, until this many minutes after the last question: the next
    predictions of this run take about a second. bayeslora serve DIR --stop ends it sooner."""

    def run(self) -> None:
        """Answer one question in words, or a file of them in JSON lines."""
        if sum(given is not None for given in (self.question, self.text, self.input)) != 1:
            raise InputError("give one of --question with --choice, --text, and --input FILE")
        if self.input is None and self.output is not None:
            raise InputError("--output belongs to --input; give that, or leave it out: a single answer is printed")
        if self.input is not None and (self.choice or self.passage or self.bare):
            raise InputError("--choice, --passage and --bare belong to --question; with --input give them in the file")
        if self.stay is not None:
            if self.input is not None:
                raise InputError(
                    "--stay is for single questions; leave it out: --input loads the model once for all of them"
                )
            check_number("stay", self.stay, above=0)
        if self.input is not None:
            self._answer_file(self.input)
        else:
            self._answer_one()

    @contextlib.contextmanager
    def _ready(self) -> Iterator[TrainedModel]:
        with self.loaded(raw=self.raw) as trained:
            if trained.calibration.conformal:
                trained.calibration.require_level(self.level)
            yield trained

    def _answer_one(self) -> None:
        """Answer by a model in memory if there is one, else by one that is loaded."""
        if self.text is not None:
            if self.choice or self.passage or self.bare:
                raise InputError("--choice, --passage and --bare belong to --question; leave them out with --text")
            from bayeslora.tasks.rows import normalise

            if not normalise(self.text):
                raise InputError("the text is empty; give one with words")
            self._show({}, self._asked_resident("/v1/classify", {"text": self.text}) or self._classified(self.text))
            return
        if self.question and len(self.choice) < 2:
            generate = f"bayeslora generate {quoted(self.directory)} --confidence --prompt {shlex.quote(self.question)}"
            raise InputError(
                f"the question has {counted(len(self.choice), 'choice')}; give --choice at least twice, or for an answer in free "
                f"text: {generate}"
            )
        from bayeslora.tasks import make_item

        item = make_item(self.question or "", self.choice, self.passage, bare=self.bare)
        body = {"question": self.question, "choices": self.choice, "passage": self.passage, "bare": self.bare}
        self._show({"id": item.id}, self._asked_resident("/v1/choices", body) or self._predicted(item))

    def _classified(self, text: str) -> dict[str, Any]:
        with _brief_process(), self._ready() as trained:
            return asdict(trained.classify([text], self.level)[0])

    def _predicted(self, item: Item) -> dict[str, Any]:
        with _brief_process(), self._ready() as trained:
            return asdict(trained.answers(trained.predict([item]), self.level)[0])

    def _asked_resident(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer of a server of this run that answers as this process would; ``None`` if there is none."""
        if self.samples is not None:
            check_samples(self.samples)
        self.require_directory()
        if self.stay is None and not any(announced()):
            return None
        wanted = self.served(raw=self.raw)
        if self.stay is not None:
            self._ensure_resident(wanted, self.stay)
        reply = ask_resident(wanted, self.samples, path, {**body, "level": self.level, "alone": True})
        return None if reply is None else {name: it for name, it in reply.items() if name not in NOT_OF_ANSWER}

    def _ensure_resident(self, wanted: Served, minutes: float) -> None:
        """Have a server that answers as wanted, and say so if it ends sooner than it is to."""
        stays = ensure_resident(wanted, self._words(), minutes)
        if stays < minutes and not self.quiet:
            print(
                f"bayeslora: note: the model is in memory already, for {stays:g} minutes and not {minutes:g}; to change that, "
                f"end it first: bayeslora serve {quoted(self.directory)} --stop",
                file=sys.stderr,
            )

    def _words(self) -> list[str]:
        """Options of a server that answers as this process would."""
        given = {"--device": self.device, "--draw-layers": self.draw_layers, "--model": self.model}
        flags = {"--raw": self.raw, "--trust-remote-code": self.trust_remote_code}
        return [
            str(self.directory),
            *(word for name, value in given.items() if value is not None for word in (name, value)),
            *(name for name, wanted in flags.items() if wanted),
        ]

    def _show(self, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Print an answer, given as the fields of :class:`bayeslora.predict.questions.answers.Answer`."""
        if self.json:
            print(json.dumps({**asked, **answer}, ensure_ascii=False))
            return
        for choice, probability in zip(answer["choices"], answer["probabilities"], strict=True):
            print(f"{probability:6.1%}  {choice}")
        sure = "not sure enough to answer" if answer["abstains"] else f"answer: {answer['answer']}"
        print(f"{sure} (uncertainty {answer['entropy']:.2f} nats, of which {answer['epistemic']:.2f} from the weights)")
        if answer["distance"] is not None:
            told = f"farther from the training questions than {answer['distance']:.1%} of the validation questions"
            print(f"{'unfamiliar' if answer['unfamiliar'] else 'familiar'} question ({told})")
        if answer["prediction_set"] is not None:
            held = ", ".join(answer["prediction_set"]) or "empty"
            promise = "nothing is promised for unfamiliar questions" if answer["unfamiliar"] else ""
            print(f"prediction set: {held} ({promise or f'{self.level:.0%} of such sets contain the answer'})")

    def _answer_file(self, source: Path) -> None:
        from bayeslora.runs.answer_file import AnswerFile
        from bayeslora.runs.batch import CHUNK, answer_file
        from bayeslora.tasks.tables import check_table

        source = source.expanduser()
        check_table(source)
        self.require_directory()
        if self.output is None:
            with self._ready() as trained:
                done, failed = _print_answers(answer_file(trained, source, self.level))
        else:
            if self.output.exists() and self.output.samefile(source):
                raise InputError(f"{self.output}: is the file of questions; choose another one for the answers")
            settings = {
                "input": str(source),
                "input_state": _state_of(source),
                "served": asdict(self.served(raw=self.raw)),
                "samples": self.samples,
                "level": self.level,
            }
            with AnswerFile(self.output, settings, chunk=CHUNK, force=self.force) as out:
                with self._ready() as trained:
                    for answer in answer_file(trained, source, self.level, skip=out.done):
                        out.write(answer)
                done, failed = out.done, out.failed
        if failed:
            raise RunsFailed(f"{source}: {failed} of {done} lines could not be answered; their answers say why")
        if self.output is not None and not (self.quiet or self.json):
            print(f"{counted(done, 'answer')}: {self.output}")


@contextlib.contextmanager
def _brief_process() -> Iterator[None]:
    """Start and end sooner, for a block that loads a model, answers once and is all that its process does."""
    import_lazily("bitsandbytes")  # PEFT imports it wherever it is installed, and only quantised models use it
    spare_collector_at_exit()
    with collector_paused():
        yield


def _state_of(path: Path) -> list[int]:
    """Fingerprint of a file that changes with its content."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


@dataclass(frozen=True, kw_only=True)
class Generate(OfDraws):
    """Continue a text with tokens from the average over draws, and report how sure the model is of them."""

    prompt: str
    """The text to continue, or with --chat what the user says. With --confidence it is a question, and needs no --chat."""
    chat: bool = False
    """Put the prompt into the model's chat template."""
    max_new_tokens: int = 128
    """Maximum number of tokens to generate."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the most probable token each time."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together have this probability (nucleus sampling)."""
    top_k: int = 0
    """Sample from this many most probable tokens; 0 from all."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the most probable one's probability."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """A text that ends generation; give the option once for each."""
    seed: int | None = None
    """Seed of the weights and of the tokens; that of the run by default."""
    confidence: bool = False
    """Also report a confidence in the text as an answer: every draw answers by itself, and calibration turns their agreement
    and the probability of the text into one number. The model abstains if that is below the calibrated threshold."""

    def run(self) -> None:
        """Generate, with the text on stdout."""
        from bayeslora.predict.generation import Writing

        writing = Writing(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            seed=self.seed or 0,
        )
        prompt = [{"role": "user", "content": self.prompt}] if self.chat else self.prompt
        with self.loaded(raw=False) as trained:
            if self.seed is None:
                writing = replace(writing, seed=trained.config.seed)
            if self.confidence:
                self._print_answer(trained.answer([prompt], writing)[0], trained.calibration)
                return
            (written,) = trained.generate([prompt], writing)
        if self.json:
            found = {"log_likelihood": written.log_likelihood, "mutual_information": written.mutual_information}
            print(json.dumps({**asdict(written), **found}, ensure_ascii=False))
            return
        print(written.text)
        tokens = len(written.token_ids)
        print(
            f"\n{counted(tokens, 'token')}; per token: log-likelihood {written.log_likelihood / tokens:.2f}, uncertainty "
            f"{sum(written.entropy) / tokens:.2f} nats, of which {written.mutual_information / tokens:.3f} from the weights"
        )

    def _print_answer(self, answer: WrittenAnswer, calibration: Calibration) -> None:
        if self.json:
            print(json.dumps(answer.to_dict(), ensure_ascii=False))
            return
        print(answer.text if not answer.abstains else f"I am not sure. I would say: {answer.text}")
        how = self._how(answer, calibration)
        said = "; ".join(f"{text!r} {share:.0%}" for text, share in answer.alternatives)
        print(
            f"\nconfidence {answer.confidence:.0%} ({how}); {answer.agreement.share:.0%} of the draws say the same"
            + (f", others: {said}" if said else "")
        )

    def _how(self, answer: WrittenAnswer, calibration: Calibration) -> str:
        """What the confidence is: it was calibrated on answers that the model ends itself."""
        if calibration.confidence is None:
            return "probability of the text, not calibrated"
        if self.stop or not answer.generation.ended:
            return "not calibrated for texts that --max-new-tokens or --stop ends"
        return "calibrated"


def _print_answers(answers: Iterator[dict[str, Any]]) -> tuple[int, int]:
    """Print answers; returns how many there were, and how many of them failed."""
    done = failed = 0
    for answer in answers:
        done += 1
        if "error" in answer:
            failed += 1
            print(f"bayeslora: {answer['error']}", file=sys.stderr)
        print(json.dumps(answer, ensure_ascii=False), flush=True)
    return done, failed
