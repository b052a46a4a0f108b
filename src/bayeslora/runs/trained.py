"""A trained run, ready to predict, evaluate and calibrate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from peft import PeftModel

from bayeslora.adapter.sampling import Sampling
from bayeslora.data_frames import Results
from bayeslora.errors import InputError
from bayeslora.models import LoadedModel
from bayeslora.predict.calibrate import Calibration, describe_target, require_enough
from bayeslora.predict.calibrate.fit import predict_both, set_scale, tuner_of
from bayeslora.predict.generation import Prompt, Writing, generate
from bayeslora.predict.generation.confidence import AnswerWriter, WrittenAnswer
from bayeslora.predict.generation.entailment import find_same
from bayeslora.predict.generation.results import Generation, Watch
from bayeslora.predict.questions.answers import Answer, make_answers
from bayeslora.predict.questions.familiarity import Familiarity
from bayeslora.predict.questions.predictions import Predictions
from bayeslora.predict.questions.predictor import Predictor
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.predict.tokens.predictor import TokenPredictor
from bayeslora.progress import Reporter, Silent
from bayeslora.runs.adapters import read_kind
from bayeslora.runs.calibration import choose_calibration, save_calibration
from bayeslora.runs.card import public_name
from bayeslora.runs.config import RunConfig
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.familiarity import renew_familiarity, with_flag
from bayeslora.runs.free_answers import calibrate_answers
from bayeslora.runs.predictors import make_predictor, make_scorer, make_token_predictor
from bayeslora.runs.result import RunResult
from bayeslora.runs.split_evaluation import TokenEvaluator
from bayeslora.tasks import (
    AnswerTask,
    Item,
    OwnFormat,
    Task,
    TokenTask,
    find_task,
    make_item,
    require_gold,
    require_options,
)
from bayeslora.tasks.answers import FreeQuestion, ask_freely, only_question
from bayeslora.tasks.file import question_item
from bayeslora.tasks.labelled import text_item
from bayeslora.tasks.rows import normalise

if TYPE_CHECKING:
    from transformers.generation import BaseStreamer


@dataclass
class TrainedModel:
    """A trained run with its base model in memory; made by :func:`load_run`.

    Attributes:
        directory: of the run.
        config: its settings.
        loaded: the base model.
        model: the base model with the adapter.
        samples: weight draws per prediction.
        draw_layers: layers in which they differ.
        calibration: calibration used in predictions.
        own: calibration that belongs to the method itself: the temperature of ``temperature``.
        report: receives progress reports.
        familiarity: tells questions unlike those of training, if it was fitted.
    """

    directory: RunDirectory
    config: RunConfig
    loaded: LoadedModel
    model: PeftModel
    samples: int
    draw_layers: str
    calibration: Calibration
    own: Calibration = field(default_factory=Calibration)
    report: Reporter = field(default_factory=Silent)
    familiarity: Familiarity | None = None

    def __repr__(self) -> str:
        calibrated = "as trained" if self.calibration in (Calibration(), self.own) else "calibrated"
        task = f" on {public_name(self.config.task)}" if self.config.task else ""
        said = f"{self.config.method}{task}, {public_name(self.config.model)}, {self.samples} draws, {calibrated}"
        return f"TrainedModel({said})"

    def ask(
        self, question: str, choices: Sequence[str], passage: str = "", level: float = 0.9, *, bare: bool = False
    ) -> Answer:
        """Answer one question; ``level`` is that of the prediction set, and a ``bare`` question has no prompt template."""
        return self.answers(self.predict([make_item(question, choices, passage, bare=bare)]), level)[0]

    def predict(self, items: Sequence[Item | Mapping[str, Any]]) -> Predictions:
        """Predictions of many questions, in their order. A question may be given as the fields of a row; see :meth:`item_of`."""
        if isinstance(items, (str, Mapping)) or not isinstance(items, Iterable):
            raise InputError(f"questions are {type(items).__name__}; give a list of them, or ask() one")
        asked = [it if isinstance(it, Item) else self.item_of(it) for it in items]
        return self.predictor()(asked, advance=self.report.stage("predicting"))

    def item_of(self, values: Mapping[str, Any]) -> Item:
        """The question of a row: ``{"question": ..., "choices": [...]}``, or ``{"text": ...}`` for a run that classifies."""
        if not isinstance(values, Mapping):
            raise InputError(
                f"a question is {values!r}; give its fields, such as {{'question': ..., 'choices': [...]}} or {{'text': ...}}"
            )
        if "text" in values and not {"question", "choices"} & values.keys():
            return text_item(values, self._labels())
        return question_item(values)

    def answers(self, predictions: Predictions, level: float = 0.9) -> Results[Answer]:
        """Predictions as answers, one by one, with prediction sets of this level if the run is calibrated."""
        return make_answers(predictions, self.calibration, level, self.familiarity)

    @overload
    def generate(self, prompts: str, writing: Writing | None = None, **settings: Any) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        writing: Writing | None = None,
        *,
        streamer: BaseStreamer | None = None,
        top: int = 0,
        watch: Watch | None = None,
        **settings: Any,
    ) -> Results[Generation]: ...

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        writing: Writing | None = None,
        *,
        streamer: BaseStreamer | None = None,
        top: int = 0,
        watch: Watch | None = None,
        **settings: Any,
    ) -> Generation | Results[Generation]:
        """Continue texts or chats with tokens from the averaged distribution and their uncertainty; see
        :func:`bayeslora.predict.generation.generate`.

        One text gives one generation, a list gives a list. Settings of :class:`bayeslora.predict.generation.Writing` may be
        given by name: ``model.generate("Once", max_new_tokens=5)``. The seed is then that of the run, if it is not given.
        """
        found = generate(
            self.model,
            self.loaded.tokenizer,
            [prompts] if isinstance(prompts, str) else prompts,
            self._writing(writing, settings),
            samples=self.samples,
            layers=self.draw_layers,
            streamer=streamer,
            top=top,
            watch=watch,
        )
        return found[0] if isinstance(prompts, str) else found

    @overload
    def answer(self, prompts: str, writing: Writing | None = None, **settings: Any) -> WrittenAnswer: ...

    @overload
    def answer(
        self, prompts: Sequence[Prompt], writing: Writing | None = None, **settings: Any
    ) -> Results[WrittenAnswer]: ...

    def answer(
        self, prompts: str | Sequence[Prompt], writing: Writing | None = None, **settings: Any
    ) -> WrittenAnswer | Results[WrittenAnswer]:
        """Answer in free text, with a confidence, the agreement between draws and what else they would say.

        A text, or a chat of one user's message, is asked as the questions of the calibration were, or of the run's own task;
        without these, as a user's message where the model has a chat template. Other chats are given to the model as they are:
        no calibration was made for them, so their confidence is the probability of the answer, and the model does not abstain.
        """
        wanted = self._writing(writing, settings)
        if not wanted.greedy:
            raise InputError(
                "an answer with a confidence is the most probable one, not a sample; leave out temperature"
            )
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        writer = self.answer_writer(wanted)
        bare = replace(writer, calibration=Calibration())
        written = writer([self.asked(it) for it in given])
        found = Results(
            bare.judge(it) if only_question(prompt) is None else it for prompt, it in zip(given, written, strict=True)
        )
        return found[0] if isinstance(prompts, str) else found

    def _writing(self, writing: Writing | None, settings: Mapping[str, Any]) -> Writing:
        """Settings of generation, by default with the seed of the run."""
        return (writing or Writing(seed=self.config.seed)).changed(settings)

    def answer_writer(self, writing: Writing) -> AnswerWriter:
        """Writes free answers with these settings, and finds the confidence of texts."""
        same = find_same(self.config.prediction.nli, self.model.device)
        sampling = replace(self._sampling, seed=writing.seed)
        return AnswerWriter(self.model, self.loaded.tokenizer, sampling, writing, self.calibration, same)

    def asked(self, prompt: Prompt) -> Prompt:
        """A prompt for a free answer, as :meth:`answer` gives it to the model."""
        question = only_question(prompt)
        if question is None:
            return prompt
        if not question.strip():
            raise InputError("a question is empty; give some text")
        task = None if self.result is None else self.result.kind
        if task == AnswerTask.kind or self.calibration.confidence is not None:
            passage, _, question = question.strip().rpartition("\n\n")
            asked = FreeQuestion("", normalise(question), passage=normalise(passage))  # as rows are read
            return ask_freely(asked, self.loaded.tokenizer)
        if not isinstance(prompt, str) or self.loaded.tokenizer.chat_template is None:
            return prompt
        return [{"role": "user", "content": prompt}]

    @cached_property
    def result(self) -> RunResult | None:
        """The result of the run, if it has one; of an adapter from the hub the kind of its task alone."""
        return self.directory.read_result() if self.directory.result.exists() else read_kind(self.directory)

    @overload
    def classify(self, texts: str, level: float = 0.9) -> Answer: ...  # type: ignore[overload-overlap]

    @overload
    def classify(self, texts: Sequence[str], level: float = 0.9) -> Results[Answer]: ...

    def classify(self, texts: str | Sequence[str], level: float = 0.9) -> Answer | Results[Answer]:
        """Labels of texts, for a run that was trained to classify. One text gives one answer, a list gives a list."""
        found = self.answers(self.predict(self.labelled([texts] if isinstance(texts, str) else texts)), level)
        return found[0] if isinstance(texts, str) else found

    def labelled(self, texts: Sequence[str]) -> list[Item]:
        """Texts to classify, as questions whose options are the labels of the run."""
        labels = self._labels()
        return [text_item({"id": str(number), "text": text}, labels) for number, text in enumerate(texts)]

    def _labels(self) -> Sequence[str]:
        """The labels of the run; refused if it has none."""
        labels = None if self.result is None else self.result.labels
        if labels is None:
            raise InputError(
                "this run was not trained to classify texts; ask it a question with choices (ask, or --question with --choice)"
            )
        return labels

    def evaluate(self, task: str | None = None, split: str = "test", data_dir: Path | None = None) -> Predictions:
        """Predictions on a split of a task with answers, by default the one it was trained on."""
        return self.predict_task(require_options(self.find_task(task, data_dir)), split)

    def find_task(
        self, name: str | None = None, data_dir: Path | None = None, how: OwnFormat | None = None
    ) -> Task | TokenTask[Any]:
        """A task by name or path; by default the one it was trained on, and own data in the format of that. The options of texts
        to classify are the labels of the run, unless the texts have others."""
        wanted = name or self.config.task
        if not wanted:
            raise InputError(f"{self.directory.path}: is an adapter without a run, which names no task; give --task")
        labels = () if self.result is None else tuple(self.result.labels or ())
        return find_task(wanted, data_dir, replace(how or self.config.data.own_format(), labels=labels, known=True))

    def predict_task(self, task: Task, split: str) -> Predictions:
        """Predictions on a split of a loaded task."""
        return self.predict(_with_answers(task, split))

    def predict_task_both(self, task: Task, split: str) -> tuple[Predictions, Predictions | None]:
        """Predictions on a split as trained and, if the run is calibrated, after calibration."""
        return self.predict_both(_with_answers(task, split))

    def calibrate(
        self,
        task: str | None = None,
        split: str = "validation",
        data_dir: Path | None = None,
        *,
        error_rate: float | None = None,
        coverage: float | None = None,
        tolerance: float | None = None,
        unfamiliar_by: str | None = None,
        unfamiliar_from: float | None = None,
        how: OwnFormat | None = None,
    ) -> Calibration:
        """Choose posterior scale, temperature and, for a target error rate or coverage, the threshold; use them from now on, and
        save them in place of an earlier calibration.

        If no threshold reaches the target, it is left out and the rest is saved; ``warnings`` of the result say so and
        list other doubts.

        With a ``tolerance``, draws differ in as few upper layers as cost at most that much NLL. Everything is chosen on
        held-out questions, by default those of the validation split. PEFT's own adapters have no scale to choose. Of free
        answers the confidence is fitted, and the threshold chosen.

        With it goes what makes a question unfamiliar: ``unfamiliar_by`` and ``unfamiliar_from`` as in
        :class:`bayeslora.train.PredictionConfig`, by default the run's own. ``how`` is the format of own data, by default that of
        the training data.
        """
        if error_rate is not None or coverage is not None:
            describe_target(error_rate, coverage)  # fail early
        flagging = with_flag(self.config.prediction, unfamiliar_by, unfamiliar_from)
        name = task or self.config.task
        source = self.find_task(name, data_dir, how)
        if isinstance(source, AnswerTask):
            if tolerance is not None:
                raise InputError("tolerance is for questions with options; leave it out")
            self._keep(self._fit_confidence(source, split, error_rate, coverage), name, split)
            return self.calibration
        if not isinstance(source, Task):
            raise InputError(
                f"task {source.name!r} cannot be used for calibration; choose one of questions with choices or with short "
                "answers, or of texts with labels"
            )
        items = _with_answers(source, split)
        require_enough(len(items), f"{name}, {split}")
        scorer = make_scorer(self.model, self.loaded, self.config, None)  # scores the same questions repeatedly
        found = choose_calibration(
            self._predictor_with(scorer),
            items,
            error_rate=error_rate,
            coverage=coverage,
            tolerance=tolerance,
            advance=self.report.stage("calibrating"),
        )
        self._keep(found, name, split)
        self.familiarity = renew_familiarity(self, items, data_dir, flagging)
        return self.calibration

    def _fit_confidence(
        self, task: AnswerTask, split: str, error_rate: float | None, coverage: float | None
    ) -> Calibration:
        """The confidence of free answers, fitted to a split, with the scale, temperature and draws in use."""
        evaluator = self.token_evaluator()
        require_enough(evaluator.count_answers(task, split), f"{task.name}, {split}")
        found = calibrate_answers(evaluator.answers(task, split), error_rate=error_rate, coverage=coverage)
        return replace(
            found,
            posterior_scale=self.calibration.posterior_scale,
            temperature=self.own.temperature,
            draw_layers=self.draw_layers,
            samples=self.samples or None,
        )

    def _keep(self, found: Calibration, task: str, split: str) -> None:
        """Use a calibration from now on, and save it with the adapter."""
        self.draw_layers = found.draw_layers
        self.calibration = replace(found, task=task, split=split)
        save_calibration(self.calibration, self.model, self.directory)

    def set_posterior_scale(self, scale: float) -> None:
        """Multiply every standard deviation of the posterior, in this object only: nothing on disk changes."""
        if tuner_of(self.model) is None:
            raise InputError(f"method {self.config.method!r} is an adapter of PEFT's own, which has no posterior scale")
        self.own = replace(self.own, posterior_scale=scale)
        self.calibration = replace(self.calibration, posterior_scale=scale)
        set_scale(self.model, scale)

    @property
    def _sampling(self) -> Sampling:
        return Sampling(self.samples, self.config.seed, self.draw_layers)

    def token_predictor(self) -> TokenPredictor:
        """Make a predictor of the tokens of texts."""
        predictor = make_token_predictor(self.model, self.loaded, self.config)
        return replace(predictor, sampling=self._sampling, calibration=self.calibration)

    def token_evaluator(self) -> TokenEvaluator:
        """Make an evaluator of texts, solutions and free answers."""
        return TokenEvaluator(
            self.config, self.model, self.loaded, self.token_predictor(), self.report, self.calibration
        )

    def predict_both(self, items: Sequence[Item]) -> tuple[Predictions, Predictions | None]:
        """Predictions as trained and, if the run is calibrated, after calibration."""
        calibration = replace(self.calibration, draw_layers=self.draw_layers) if self.calibration != self.own else None
        predictor = replace(self.predictor(), calibration=self.own)
        return predict_both(predictor, items, predictor.encode(items), calibration, self.report.stage("predicting"))

    def predictor(self) -> Predictor:
        """Make a predictor of questions."""
        return self._predictor_with(Scorer(self.model, self.loaded.tokenizer.pad_token_id))

    def _predictor_with(self, scorer: Scorer) -> Predictor:
        predictor = make_predictor(scorer, self.loaded, self.config)
        return replace(predictor, sampling=self._sampling, calibration=self.calibration, familiarity=self.familiarity)


def _with_answers(task: Task, split: str) -> Sequence[Item]:
    items = task.load(split).items
    require_gold(items)
    return items
