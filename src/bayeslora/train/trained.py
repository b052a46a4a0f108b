"""A trained run, ready for questions: predict, evaluate, calibrate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from peft import PeftModel
from peft.utils import CONFIG_NAME

from bayeslora.adapter import BayesLoraModel
from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.loading import load_adapter
from bayeslora.depth import check_depth
from bayeslora.errors import InputError
from bayeslora.files import replacing
from bayeslora.methods import find_method
from bayeslora.models import LoadedModel
from bayeslora.predict.answers import Answer, make_answers
from bayeslora.predict.calibrate import (
    DEFAULT_SCALES,
    PRIOR_SD,
    Calibration,
    Unreached,
    choose_cut,
    choose_scale,
    choose_threshold,
    conformal_thresholds,
    describe_doubts,
    describe_target,
    fit_temperature,
    require_enough,
)
from bayeslora.predict.generate import Prompt, Writing, generate
from bayeslora.predict.predictions import Predictions, main_metrics
from bayeslora.predict.predictor import Predictor
from bayeslora.predict.scorer import Scorer, linearised_posterior
from bayeslora.predict.token_predictor import TokenPredictor
from bayeslora.predict.written import Generation, Watch
from bayeslora.progress import Reporter, Silent
from bayeslora.tasks import Item, Task, load_task, make_item, require_gold
from bayeslora.train.config import RunConfig, check_samples, from_dict
from bayeslora.train.directory import RunDirectory
from bayeslora.train.question_work import make_predictor, make_scorer
from bayeslora.train.run import load_base
from bayeslora.train.token_work import make_token_predictor

if TYPE_CHECKING:
    from transformers.generation import BaseStreamer


@dataclass
class TrainedModel:
    """A trained run with its base model in memory; made by :func:`load_run`."""

    directory: RunDirectory
    config: RunConfig
    loaded: LoadedModel
    model: PeftModel
    samples: int
    draw_layers: str
    calibration: Calibration
    report: Reporter = field(default_factory=Silent)

    def ask(
        self, question: str, choices: Sequence[str], passage: str = "", level: float = 0.9, *, bare: bool = False
    ) -> Answer:
        """Answer one question; ``level`` is that of the prediction set, and a ``bare`` question is asked as it stands."""
        return self.answers(self.predict([make_item(question, choices, passage, bare=bare)]), level)[0]

    def predict(self, items: Sequence[Item]) -> Predictions:
        """Predictions of many questions, in their order."""
        return self.predictor()(items, advance=self.report.stage("predicting"))

    def answers(self, predictions: Predictions, level: float = 0.9) -> list[Answer]:
        """Predictions as answers, one by one, with prediction sets of this level if the run is calibrated."""
        return make_answers(predictions, self.calibration, level)

    def generate(
        self,
        prompts: Sequence[Prompt],
        writing: Writing | None = None,
        *,
        streamer: BaseStreamer | None = None,
        top: int = 0,
        watch: Watch | None = None,
    ) -> list[Generation]:
        """Continue texts or chats with tokens from the averaged distribution, with the uncertainty of every token; see
        :func:`bayeslora.predict.generate.generate`."""
        return generate(
            self.model,
            self.loaded.tokenizer,
            prompts,
            writing,
            samples=self.samples,
            layers=self.draw_layers,
            streamer=streamer,
            top=top,
            watch=watch,
        )

    def evaluate(self, task: str | None = None, split: str = "test", data_dir: Path | None = None) -> Predictions:
        """Predictions on a split of a task with answers, by default of the one it was trained on."""
        return self.predict_task(load_task(task or self.config.task, data_dir), split)

    def predict_task(self, task: Task, split: str) -> Predictions:
        """The same for a task that is at hand."""
        items = task.load(split).items
        require_gold(items)
        return self.predict(items)

    def calibrate(
        self,
        task: str | None = None,
        split: str = "validation",
        data_dir: Path | None = None,
        *,
        error_rate: float | None = None,
        coverage: float | None = None,
        tolerance: float | None = None,
    ) -> Calibration:
        """Choose posterior scale, temperature and, for a wanted error rate or coverage, the threshold; keep them.

        A rate that no threshold reaches leaves the threshold out and keeps the rest; ``warnings`` of what is returned say so, and
        whatever else is doubtful.

        With a ``tolerance``, draws are made to differ in as few upper layers as costs at most that much NLL. Everything is
        chosen on held-out questions: those of the validation split, unless told otherwise. Adapters of PEFT's own have no
        scale to choose.
        """
        if error_rate is not None or coverage is not None:
            describe_target(error_rate, coverage)  # refused now rather than when all is computed
        name = task or self.config.task
        items = load_task(name, data_dir).load(split).items
        require_gold(items)
        require_enough(len(items), f"{name}, {split}")
        kept = 1.0 if self._tuner is None else self._tuner.posterior_scale
        try:
            found = self._choose(items, error_rate, coverage, tolerance)
        except BaseException:
            self._set_scale(kept)
            raise
        self.draw_layers = found.draw_layers
        self.calibration = replace(found, samples=self.samples or None, task=name, split=split)
        self._keep_calibration()
        return self.calibration

    def _choose(
        self, items: Sequence[Item], error_rate: float | None, coverage: float | None, tolerance: float | None
    ) -> Calibration:
        """Layers and scale first, then temperature, then thresholds: each changes what the next one sees."""
        gold = np.array(require_gold(items))
        scorer = make_scorer(self.model, self.loaded, self.config, None)  # the same questions many times over
        predictor = replace(self._predictor_with(scorer), calibration=Calibration())
        encoded = predictor.encode(items)

        def scores(layers: str, scale: float) -> NDArray[np.float64]:
            self._set_scale(scale)
            return replace(predictor, layers=layers).score(encoded).predictive

        self._set_scale(1.0)
        before = predictor(items, encoded)
        layers, scale = self.draw_layers, 1.0
        if self._tuner is not None and self._is_spread(before):
            advance = self.report.stage("calibrating")
            holder = self._tuner.holder
            scales = DEFAULT_SCALES if any(holder.posterior(name).has_width for name in holder.active) else (1.0,)
            if tolerance is None:
                scale = choose_scale(lambda scale: scores(layers, scale), gold, scales, advance).scale
            else:
                cut = choose_cut(scores, gold, tolerance, scales, advance)
                layers, scale = cut.layers, cut.scale
        temperature = fit_temperature(scores(layers, scale), gold, PRIOR_SD)
        found = Calibration(
            temperature=temperature,
            posterior_scale=scale,
            draw_layers=layers,
            questions=len(items),
        )
        after = replace(predictor, calibration=found, layers=layers)(items, encoded)
        found = replace(
            found,
            conformal=conformal_thresholds(after.probabilities, gold),
            before=main_metrics(before.metrics()),
            after=main_metrics(after.metrics()),
        )
        found = replace(found, warnings=describe_doubts(found))
        if error_rate is None and coverage is None:
            return found
        try:
            threshold = choose_threshold(after.probabilities, gold, error_rate=error_rate, coverage=coverage)
        except Unreached as error:
            return replace(found, warnings=(*found.warnings, f"there is no threshold: {error}"))
        return replace(found, threshold=threshold.confidence, target=threshold.target)

    def _is_spread(self, predictions: Predictions) -> bool:
        """Whether there are several draws, or their spread in closed form."""
        several = predictions.draws is not None and len(predictions.draws) > 1
        return several or (self.samples > 0 and linearised_posterior(find_any_holder(self.model)) is not None)

    @property
    def _tuner(self) -> BayesLoraModel | None:
        """Where the posterior's scale is; nothing for adapters of PEFT's own."""
        tuner = self.model.base_model
        return tuner if isinstance(tuner, BayesLoraModel) else None

    def set_posterior_scale(self, scale: float) -> None:
        """Multiply every standard deviation of the posterior, in this object only: nothing on disk changes."""
        if self._tuner is None:
            raise InputError(f"method {self.config.method!r} is an adapter of PEFT's own, which has no posterior scale")
        self.calibration = replace(self.calibration, posterior_scale=scale)
        self._set_scale(scale)

    def _set_scale(self, scale: float) -> None:
        if self._tuner is not None:
            self._tuner.posterior_scale = scale

    def _keep_calibration(self) -> None:
        """Beside the adapter; the scale also where everybody who loads the adapter with PEFT gets it."""
        with replacing(self.directory.adapter / CONFIG_NAME) as partial, TemporaryDirectory() as folder:
            self.model.peft_config["default"].save_pretrained(folder)
            partial.write_bytes((Path(folder) / CONFIG_NAME).read_bytes())
        self.calibration.save(self.directory.calibration)

    def token_predictor(self) -> TokenPredictor:
        """What predicts the tokens of texts."""
        predictor = make_token_predictor(self.model, self.loaded, self.config)
        return replace(predictor, samples=self.samples, layers=self.draw_layers, calibration=self.calibration)

    def predictor(self) -> Predictor:
        """What predicts the answers of questions."""
        return self._predictor_with(Scorer(self.model, self.loaded.tokenizer.pad_token_id))

    def _predictor_with(self, scorer: Scorer) -> Predictor:
        predictor = make_predictor(scorer, self.loaded, self.config)
        return replace(predictor, samples=self.samples, layers=self.draw_layers, calibration=self.calibration)


def _require_method(model: PeftModel, config: RunConfig, directory: RunDirectory) -> None:
    """Refuse an adapter that is not what such a run makes."""
    method = find_method(config.method)
    known: tuple[str | None, ...] = (None,) if method.foreign() else method.posteriors
    found = getattr(model.peft_config["default"], "posterior", None)
    if found not in known:
        raise InputError(
            f"{directory.path}: its settings say method {method.name!r}, but its adapter holds {found or 'something else'}; "
            f"restore {directory.config.name}, or train again with --force"
        )


def load_run(
    path: str | Path,
    *,
    device: str = "auto",
    samples: int | None = None,
    draw_layers: str | None = None,
    raw: bool = False,
    report: Reporter | None = None,
    loaded: LoadedModel | None = None,
    trust_remote_code: bool = False,
) -> TrainedModel:
    """Load a trained run.

    Args:
        path: the run's directory.
        device: as for :func:`bayeslora.load_model`.
        samples: weight draws per prediction; the run's own number by default, 0 for the posterior mean.
        draw_layers: layers in which draws differ, ``all``, ``last:K`` or a fraction; by default those that calibration has
            chosen, or the run's own.
        raw: leave out what ``bayeslora calibrate`` found.
        report: told how long work goes.
        loaded: the base model, if somebody has loaded it already; ``unload()`` the run's ``model`` to have it back.
        trust_remote_code: run code that the base model's repository brings along. Whoever trained the run cannot decide that.
    """
    directory = RunDirectory(Path(path))
    try:
        config = from_dict(directory.read_config())
    except InputError as error:
        raise InputError(f"{directory.path}: holds no run that can be used: {error}") from error
    if not (directory.adapter / CONFIG_NAME).exists():
        raise InputError(f"{directory.path}: has no adapter yet; give its train command again to go on with it")
    foreign = find_method(config.method).foreign()
    loaded = loaded or load_base(config, device, trust_remote_code=trust_remote_code)
    model = load_adapter(loaded.model, directory.adapter)
    _require_method(model, config, directory)
    calibrated = not raw and directory.calibration.exists()
    calibration = Calibration.load(directory.calibration) if calibrated else Calibration()
    if foreign is not None:
        foreign.attach(model)
    samples = config.prediction.samples if samples is None else samples
    check_samples(samples)
    if draw_layers is None:
        draw_layers = calibration.draw_layers if calibrated else config.prediction.draw_layers
    check_depth(draw_layers, "draw_layers")
    trained = TrainedModel(directory, config, loaded, model, samples, draw_layers, calibration, report or Silent())
    trained._set_scale(calibration.posterior_scale)
    return trained
