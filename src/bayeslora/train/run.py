"""One run: settings in; adapter, predictions and result out.

The same call resumes an interrupted run, and returns the result of a finished one. It writes only to the run's directory,
whose files are complete at any moment.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bayeslora.adapter import BayesLoraConfig, find_holder
from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.lora import read_lora
from bayeslora.atomic_files import replacing_directory, tensor_failures
from bayeslora.errors import InputError
from bayeslora.layer_ranges import upper_layers
from bayeslora.methods import find_method
from bayeslora.methods.base import PostHocResult
from bayeslora.models import LoadedModel
from bayeslora.posterior import Factors
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.questions.familiarity import Familiarity
from bayeslora.predict.trunk import TrunkCache
from bayeslora.progress import Reporter, Silent, default_reporter
from bayeslora.runs.card import make_card, public_name
from bayeslora.runs.card_figure import FIGURE, reliability_svg
from bayeslora.runs.config import AdapterConfig, RunConfig, resolve
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.environment import describe_environment, forget_peak_memory, peak_memory
from bayeslora.runs.predictors import load_base
from bayeslora.runs.result import RunResult
from bayeslora.runs.saved_config import flatten, to_dict
from bayeslora.runs.split_evaluation import EvaluatedSplit
from bayeslora.tasks import Task, find_task
from bayeslora.train.checkpoint import TrainingState
from bayeslora.train.fit import Fit
from bayeslora.train.origin import lora_runs, require_origins
from bayeslora.train.processes import Processes
from bayeslora.train.question_runner import QuestionRunner
from bayeslora.train.task_runner import TaskRunner
from bayeslora.train.token_runner import TokenRunner
from bayeslora.train.trackers import require_trackers, tracking

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class RunContext:
    """Resources and callbacks of a run; none of them changes the outcome.

    Attributes:
        data_dir: local copies of the benchmarks; without it they are read from the hub.
        device: as for :func:`bayeslora.load_model`.
        report_to: trackers, such as ``tensorboard``.
        report: receives progress reports.
        checkpoint_seconds: at most this much work is lost if the run is killed, in seconds.
        trust_remote_code: run code from the base model's repository. It must be given each time and is never saved.
        loaded: the base model, if it is loaded already.
        trunk: cached outputs of the frozen layers from earlier runs of the same base model with the same layers.
    """

    data_dir: Path | None = None
    device: str = "auto"
    report_to: Sequence[str] = ()
    report: Reporter = field(default_factory=default_reporter)
    checkpoint_seconds: float = 60.0
    trust_remote_code: bool = False
    loaded: LoadedModel | None = None
    trunk: TrunkCache | None = None

    def __post_init__(self) -> None:
        if not self.checkpoint_seconds >= 0:
            raise InputError(f"checkpoint_seconds is {self.checkpoint_seconds}; give a number of at least 0")


def train(config: RunConfig, out: str | Path, place: RunContext | None = None, *, force: bool = False) -> RunResult:
    """Run the settings in the directory ``out``, or resume there; returns the contents of ``result.json``.

    Args:
        config: the run.
        out: its directory. One with another run is refused.
        place: resources and callbacks; found automatically by default.
        force: replace another run.
    """
    place = place or RunContext()
    config = resolve(config)
    directory = RunDirectory(Path(out))
    processes = Processes.join(place.device)
    _require_shareable(config, processes)
    with directory.locked() if processes.main else nullcontext():
        result = processes.agree(lambda: None if force else _done(config, directory, place.report))
        if result is not None:
            return result
        return _Run(config, directory, _own_place(place, processes), processes, force=force).execute()


def _done(config: RunConfig, directory: RunDirectory, report: Reporter) -> RunResult | None:
    """The result of a finished run; a directory with another run is refused."""
    directory.require_free_or_same(to_dict(config))
    if not directory.result.exists():
        return None
    directory.checkpoint.unlink(missing_ok=True)  # left by a run that was killed just before its end
    report.say(f"{directory.path}: the run is done already")
    return directory.read_result()


def _require_shareable(config: RunConfig, processes: Processes) -> None:
    if processes.count == 1:
        return
    if find_method(config.method).fit_post_hoc is not None:
        raise InputError(
            f"method {config.method!r} is made from LoRAs that are trained already, which takes one process; train the LoRAs "
            f"with several (--method lora), then run this one alone with --start-from"
        )
    if config.training.cache_trunk:
        raise InputError("cache_trunk keeps what one process computes; leave it out when several train together")


def _own_place(place: RunContext, processes: Processes) -> RunContext:
    """The context of one of several processes: its own device, and reports from the main process only."""
    if processes.count == 1:
        return place
    device = "cpu" if processes.sharded else processes.device or place.device
    return (
        replace(place, device=device)
        if processes.main
        else replace(place, device=device, report=Silent(), report_to=())
    )


def adapt(loaded: LoadedModel, config: RunConfig) -> PeftModel:
    """Put the method's adapter on a base model."""
    from peft import get_peft_model

    adapter, method = config.adapter, find_method(config.method)
    layers, foreign = _layer_indices(loaded, adapter), method.foreign()
    rank = adapter.rank if config.start_from else round(method.start_rank * adapter.rank)
    if foreign is None:
        peft_config = BayesLoraConfig(
            task_type="CAUSAL_LM",
            posterior=adapter.posterior or method.posterior_name,
            settings=dict(adapter.settings),
            r=rank,
            lora_alpha=adapter.alpha * (rank / adapter.rank),
            target_modules=list(adapter.targets),
            layers_to_transform=layers,
            stochastic_layers=adapter.stochastic_layers,
            snapshots=config.training.snapshots or 0,
            members=config.training.members or 0,
            seed=config.seed,
        )
    else:
        peft_config = foreign.peft_config(
            adapter.settings,
            rank=adapter.rank,
            alpha=adapter.alpha,
            targets=adapter.targets,
            layers=layers,
            seed=config.seed,
        )
    try:
        if foreign is not None:
            return foreign.adapt(loaded.model, peft_config, config.seed)
        return get_peft_model(loaded.model, peft_config)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(
            f"{loaded.name} cannot be adapted at {', '.join(adapter.targets)}: {str(error).rstrip('.')}; its linear modules "
            f"are {', '.join(_linear_modules(loaded.model))}"
        ) from error


class _Run:
    def __init__(
        self, config: RunConfig, directory: RunDirectory, place: RunContext, processes: Processes, *, force: bool
    ) -> None:
        self.config = config
        self.directory = directory
        self.place = place
        self.processes = processes
        self.report = place.report
        self.force = force

    def execute(self) -> RunResult:
        """Check all input before touching the directory: a mistake costs no earlier run."""
        forget_peak_memory()
        require_trackers(self.place.report_to)
        runner = open_task(self.config, self.place.data_dir)
        if self.processes.count > 1 and runner.writes_as_it_evaluates:
            raise InputError(
                "solutions are written by one process; use --solutions 0 here, and bayeslora evaluate later"
            )
        loaded = self.place.loaded or load_base(
            self.config, self.place.device, trust_remote_code=self.place.trust_remote_code
        )
        runner.encode(loaded)
        origins = self._origins(loaded)
        model = adapt(loaded, self.config)
        try:
            loras = [read_lora(model, find_holder(model), "default", path) for path in origins]
            return self._train(model, runner, loras)
        finally:  # the base model may be shared
            if self.config.training.gradient_checkpointing:
                model.gradient_checkpointing_disable()
            model.unload()

    def _origins(self, loaded: LoadedModel) -> list[str]:
        """Adapters of the LoRAs to start from: the given ones, or those that the method needs, trained first."""
        if self.config.start_from:
            return require_origins(self.config, self.directory.path)
        runs = lora_runs(self.config)
        if runs:
            self.directory.claim(to_dict(self.config), force=self.force)
            self.force = False
        place = replace(self.place, loaded=loaded)
        for number, config in enumerate(runs):
            self.report.say(f"LoRA {number + 1} of {len(runs)}:")
            train(config, self.directory.lora(number), place)
        return [str(RunDirectory(self.directory.lora(number)).adapter) for number in range(len(runs))]

    def _train(self, model: PeftModel, runner: TaskRunner, loras: Sequence[Factors]) -> RunResult:
        if self.config.training.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.processes.shard(model.get_base_model(), find_any_holder(model))
        runner.bind(model, self.place.trunk)
        self.processes.agree(lambda: self.directory.claim(to_dict(self.config), force=self.force))
        runner.prepare(self.report)
        fitted = None
        if find_method(self.config.method).fit_post_hoc is None:
            if loras:
                find_holder(model).posterior("default").start_from(loras[0])
            state = self._fit(runner)
        else:
            fitted, state = self._fit_post_hoc(model, runner, loras)
        own, start = fitted.calibration if fitted is not None else None, time.perf_counter()
        calibration = own or runner.calibrate(self.report)
        familiarity = runner.measure_familiarity(calibration, self.report)
        middle = time.perf_counter()
        evaluated = runner.evaluate(own or Calibration(), calibration, self.directory, self.report)
        seconds = {"calibrate_seconds": middle - start, "predict_seconds": time.perf_counter() - middle}
        result = self._result(runner, model, state, evaluated, seconds)
        if fitted is not None:
            result = replace(result, found=dict(fitted.found))
        self.processes.agree(lambda: self._write(model, evaluated, result, calibration, familiarity))
        return result

    def _fit_post_hoc(
        self, model: PeftModel, runner: TaskRunner, loras: Sequence[Factors]
    ) -> tuple[PostHocResult, TrainingState]:
        """Fit the method to its LoRAs; the time counts as training, that of the LoRAs is in their own results."""
        method = find_method(self.config.method)
        assert method.fit_post_hoc is not None
        inputs = runner.post_hoc_inputs(find_holder(model).posterior("default"), loras, self.report)
        start = time.perf_counter()
        fitted = method.fit_post_hoc(inputs)
        model.eval()
        return fitted, TrainingState(seconds=time.perf_counter() - start)

    def _fit(self, runner: TaskRunner) -> TrainingState:
        settings = flatten(to_dict(self.config))
        with tracking(self.place.report_to, self.directory.path, settings) as log:
            fit = Fit(
                runner.objective,
                runner.examples,
                self.config.training,
                self.config.seed,
                lambda: runner.validate(self.report),
                checkpoint=self.directory.checkpoint,
                checkpoint_seconds=self.place.checkpoint_seconds,
                run=_digest(self.config, runner.fingerprint()),
                report=self.report,
                log=log,
                processes=self.processes,
            )
            return fit()

    def _result(
        self,
        runner: TaskRunner,
        model: PeftModel,
        state: TrainingState,
        evaluated: EvaluatedSplit,
        seconds: Mapping[str, float],
    ) -> RunResult:
        trainable, total = model.get_nb_trainable_parameters()
        device = next(model.parameters()).device
        return RunResult(
            config=to_dict(self.config),
            environment=describe_environment(device),
            processes=self.processes.count,
            seed=self.config.seed,
            split=self.config.report_split,
            metrics=evaluated.metrics,
            intervals=evaluated.intervals,
            counts=runner.counts,
            timing={
                "train_seconds": state.seconds,
                "seconds_per_step": state.step_seconds / max(1, state.step),
                "steps": state.step,
                **seconds,
            },
            memory={"peak_bytes": peak_memory(device)},
            parameters={"trainable": trainable, "total": total},
            history=state.history,
            stopped_early=state.stopped,
            kind=runner.kind,
            title=public_name(self.config.task),
            labels=runner.labels,
            **evaluated.more,
        )

    def _write(
        self,
        model: PeftModel,
        evaluated: EvaluatedSplit,
        result: RunResult,
        calibration: Calibration | None,
        familiarity: Familiarity | None,
    ) -> None:
        """Write adapter and predictions first, the result last: a result implies that the rest is there."""
        base = model.peft_config["default"].base_model_name_or_path
        figures = {FIGURE: reliability_svg(evaluated.reliability)} if evaluated.reliability else {}
        card = make_card(result, base, FIGURE if figures else None)
        _save_adapter(model, self.directory.adapter, {"README.md": card, **figures})
        if calibration is not None:
            calibration.save(self.directory.calibration)
        if familiarity is not None:
            familiarity.save(self.directory.familiarity)
        evaluated.write(self.directory)
        result.write(self.directory.result)
        self.directory.checkpoint.unlink(missing_ok=True)


def open_task(config: RunConfig, data_dir: Path | None) -> TaskRunner:
    """Open and read the run's task."""
    task = find_task(config.task, data_dir, config.data.own_format())
    return QuestionRunner(config, task) if isinstance(task, Task) else TokenRunner(config, task)


def _save_adapter(model: PeftModel, path: Path, texts: Mapping[str, str]) -> None:
    """Write the adapter's directory atomically, with the texts beside it by name: its model card and the card's figure."""
    with replacing_directory(path) as partial, tensor_failures(path):
        model.save_pretrained(str(partial))
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")


def _linear_modules(model: torch.nn.Module) -> list[str]:
    """Names of modules that can be adapted, without their paths."""
    linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return sorted({name.rpartition(".")[2] for name in linear})


def _layer_indices(loaded: LoadedModel, adapter: AdapterConfig) -> list[int] | None:
    if adapter.layers == "all":
        return None
    count = loaded.model.config.num_hidden_layers
    return list(range(count - upper_layers(adapter.layers, count), count))


def _digest(config: RunConfig, fingerprint: Iterable[object]) -> str:
    """Identifies a run by its settings and the tokens it is trained on."""
    record = json.dumps(to_dict(config), sort_keys=True)
    digest = hashlib.sha256(record.encode())
    for part in fingerprint:
        digest.update(repr(part).encode())
    return digest.hexdigest()
