"""One run: settings in; adapter, predictions and result out.

The same call goes on with an interrupted run, and returns the result of one that is done. Nothing is written but into
the run's directory, and everything there is whole at any moment.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bayeslora.adapter import BayesLoraConfig, find_holder
from bayeslora.adapter.lora import read_lora
from bayeslora.depth import upper_layers
from bayeslora.errors import InputError
from bayeslora.files import tensor_failures, write_json
from bayeslora.methods import find_method
from bayeslora.methods.base import Made, Making
from bayeslora.models import LoadedModel, load_model
from bayeslora.posterior import Factors
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.predictions import Predictions, main_metrics
from bayeslora.predict.predictor import Predictor
from bayeslora.predict.scorer import Scorer
from bayeslora.predict.trunk import TrunkCache, TrunkScorer
from bayeslora.progress import Reporter, Silent
from bayeslora.tasks import Item, Questions, Split, SplitName, encode_items, load_task, require_gold
from bayeslora.train.checkpoint import TrainingState
from bayeslora.train.config import AdapterConfig, RunConfig, flatten, resolve, to_dict
from bayeslora.train.directory import RunDirectory
from bayeslora.train.environment import describe_environment, peak_memory
from bayeslora.train.fit import Example, Fit
from bayeslora.train.origin import lora_runs, require_origins
from bayeslora.train.trackers import require_trackers, tracking

if TYPE_CHECKING:
    from peft import PeftModel

SCHEMA = 1


@dataclass(frozen=True)
class Place:
    """Where a run finds things and whom it tells; none of it changes the outcome.

    Attributes:
        data_dir: local copies of the benchmarks; without it they are read from the hub.
        device: as for :func:`bayeslora.load_model`.
        report_to: trackers, such as ``tensorboard``.
        report: told how it goes.
        checkpoint_seconds: the most work that is lost if the run is killed, in seconds.
        loaded: the base model, if somebody has loaded it already.
        trunk: what the frozen layers gave in earlier runs of the same base model with the same layers.
    """

    data_dir: Path | None = None
    device: str = "auto"
    report_to: Sequence[str] = ()
    report: Reporter = field(default_factory=Silent)
    checkpoint_seconds: float = 60.0
    loaded: LoadedModel | None = None
    trunk: TrunkCache | None = None

    def __post_init__(self) -> None:
        if not self.checkpoint_seconds >= 0:
            raise InputError(f"checkpoint_seconds is {self.checkpoint_seconds}; give a number of at least 0")


def train(config: RunConfig, out: str | Path, place: Place | None = None, *, force: bool = False) -> dict[str, Any]:
    """Run, or go on with, what the settings say, in the directory ``out``; returns what ``result.json`` holds.

    Args:
        config: the run.
        out: its directory. One that holds another run is refused.
        place: where things are; by default everything is found by itself.
        force: replace another run.
    """
    place = place or Place()
    config = resolve(config)
    directory = RunDirectory(Path(out))
    with directory.locked():
        if not force:
            directory.require_free_or_same(to_dict(config))
            if directory.result.exists():
                directory.checkpoint.unlink(missing_ok=True)  # of a run that was killed when it was all but done
                place.report.say(f"{directory.path}: the run is done already")
                return directory.read_result()
        return _Run(config, directory, place, force=force).execute()


def adapt(loaded: LoadedModel, config: RunConfig) -> PeftModel:
    """Put the method's adapter on a base model."""
    from peft import get_peft_model

    adapter, method = config.adapter, find_method(config.method)
    layers, foreign = _layer_indices(loaded, adapter), method.foreign()
    if foreign is None:
        peft_config = BayesLoraConfig(
            task_type="CAUSAL_LM",
            posterior=method.posterior,
            settings=dict(adapter.settings),
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            target_modules=list(adapter.targets),
            layers_to_transform=layers,
            stochastic_layers=adapter.stochastic_layers,
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


def make_scorer(model: PeftModel, loaded: LoadedModel, config: RunConfig, trunk: TrunkCache | None) -> Scorer:
    """A scorer for the adapted model, with a kept trunk if the settings say so."""
    pad_id = loaded.tokenizer.pad_token_id
    return TrunkScorer(model, pad_id, trunk) if config.training.cache_trunk else Scorer(model, pad_id)


def make_predictor(scorer: Scorer, loaded: LoadedModel, config: RunConfig) -> Predictor:
    """What predicts as the settings say."""
    return Predictor(
        scorer,
        loaded.tokenizer,
        scoring=config.data.scoring,
        max_tokens=config.data.max_tokens,
        samples=config.prediction.samples,
        seed=config.seed,
        batch_tokens=config.prediction.batch_tokens,
        layers=config.prediction.draw_layers,
    )


def load_base(config: RunConfig, device: str) -> LoadedModel:
    """The base model of a run."""
    loading = config.loading
    return load_model(
        config.model,
        dtype=loading.dtype,
        device=device,
        bits=loading.bits,
        revision=loading.revision,
        trust_remote_code=loading.trust_remote_code,
    )


class _Run:
    def __init__(self, config: RunConfig, directory: RunDirectory, place: Place, *, force: bool) -> None:
        self.config = config
        self.directory = directory
        self.place = place
        self.report = place.report
        self.force = force

    def execute(self) -> dict[str, Any]:
        """All input is checked before the directory is touched: a mistake costs no earlier run."""
        require_trackers(self.place.report_to)
        splits = self._read()
        loaded = self.place.loaded or load_base(self.config, self.place.device)
        parts = {name: self._encode(split.items, loaded) for name, split in splits.items()}
        origins = self._origins(loaded)
        model = adapt(loaded, self.config)
        try:
            loras = [read_lora(model, find_holder(model), "default", path) for path in origins]
            return self._train(model, loaded, splits, parts, loras)
        finally:
            model.unload()  # the base model may be somebody else's

    def _origins(self, loaded: LoadedModel) -> list[str]:
        """Adapters of the LoRAs to start from: those that were given, or those that the method needs, trained first."""
        if self.config.start_from:
            return require_origins(self.config)
        runs = lora_runs(self.config)
        if runs:
            self.directory.claim(to_dict(self.config), force=self.force)
            self.force = False
        place = replace(self.place, loaded=loaded)
        for number, config in enumerate(runs):
            self.report.say(f"LoRA {number + 1} of {len(runs)}:")
            train(config, self.directory.lora(number), place)
        return [str(RunDirectory(self.directory.lora(number)).adapter) for number in range(len(runs))]

    def _train(
        self,
        model: PeftModel,
        loaded: LoadedModel,
        splits: Mapping[str, Split],
        parts: Mapping[str, Questions],
        loras: Sequence[Factors],
    ) -> dict[str, Any]:
        if self.config.training.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        scorer = make_scorer(model, loaded, self.config, self.place.trunk)
        predictor = make_predictor(scorer, loaded, self.config)
        self.directory.claim(to_dict(self.config), force=self.force)
        encoded = [item for part in parts.values() for item in part.encoded]
        scorer.prepare(encoded, self.config.prediction.batch_tokens, self.report.stage("computing the frozen layers"))
        made = None
        if find_method(self.config.method).make is None:
            if loras:
                find_holder(model).posterior("default").start_from(loras[0])
            state = self._fit(scorer, predictor, parts)
        else:
            made, state = self._make(model, predictor, parts, loras)
            predictor = replace(predictor, calibration=made.calibration or Calibration())
        start = time.perf_counter()
        reported = parts[self.config.report_split]
        predictions = predictor(reported.items, reported.encoded, self.report.stage("predicting"))
        seconds = time.perf_counter() - start
        result = self._result(splits, model, state, predictions, seconds, scorer.device)
        if made is not None:
            result["found"] = dict(made.found)
        self._write(model, predictions, result, made)
        return result

    def _make(
        self, model: PeftModel, predictor: Predictor, parts: Mapping[str, Questions], loras: Sequence[Factors]
    ) -> tuple[Made, TrainingState]:
        """Make the method from its LoRAs; the time it took counts as training, theirs is in their own results."""
        method = find_method(self.config.method)
        assert method.make is not None
        making = Making(
            posterior=find_holder(model).posterior("default"),
            loras=loras,
            predictor=predictor,
            train=parts["train"],
            validation=parts["validation"],
            seed=self.config.seed,
            report=self.report,
        )
        start = time.perf_counter()
        made = method.make(making)
        model.eval()
        return made, TrainingState(seconds=time.perf_counter() - start)

    def _read(self) -> dict[str, Split]:
        """All splits, read before anything else: whatever is wrong with data is found before the model is loaded."""
        task = load_task(self.config.task, self.place.data_dir)
        splits: dict[str, Split] = {name: task.load(name) for name in self._splits}
        limit = self.config.data.max_train
        if limit is not None:
            items = list(splits["train"].items)
            random.Random("max_train").shuffle(
                items
            )  # the same for all seeds: members of an ensemble learn from the same
            splits["train"] = replace(splits["train"], items=tuple(items[:limit]))
        for name, split in splits.items():
            if not split.items:
                raise InputError(
                    f"task {self.config.task!r}: its {name} split is empty; a run needs {', '.join(self._splits)}"
                )
            try:
                require_gold(split)
            except InputError as error:
                raise InputError(f"task {self.config.task!r}, {name} split: {error}") from error
        return splits

    @property
    def _splits(self) -> tuple[SplitName, ...]:
        return ("train", "validation") if self.config.report_split == "validation" else ("train", "validation", "test")

    def _encode(self, items: tuple[Item, ...], loaded: LoadedModel) -> Questions:
        data = self.config.data
        return Questions(items, encode_items(items, loaded.tokenizer, data.scoring, data.max_tokens))

    def _fit(self, scorer: Scorer, predictor: Predictor, parts: Mapping[str, Questions]) -> TrainingState:
        train, validation = parts["train"], parts["validation"]
        examples = [
            Example(item.id, encoded, gold)
            for item, encoded, gold in zip(train.items, train.encoded, require_gold(train.items), strict=True)
        ]

        def validate() -> Mapping[str, float]:
            predictions = predictor(validation.items, validation.encoded, self.report.stage("validating"))
            return main_metrics(predictions.metrics())

        settings = flatten(to_dict(self.config))
        with tracking(self.place.report_to, self.directory.path, settings) as log:
            fit = Fit(
                scorer,
                examples,
                self.config.training,
                self.config.seed,
                validate,
                checkpoint=self.directory.checkpoint,
                checkpoint_seconds=self.place.checkpoint_seconds,
                run=_digest(self.config, parts),
                report=self.report,
                log=log,
            )
            return fit()

    def _result(
        self,
        splits: Mapping[str, Split],
        model: PeftModel,
        state: TrainingState,
        predictions: Predictions,
        predict_seconds: float,
        device: torch.device,
    ) -> dict[str, Any]:
        trainable, total = model.get_nb_trainable_parameters()
        return {
            "schema": SCHEMA,
            "config": to_dict(self.config),
            "environment": describe_environment(device),
            "seed": self.config.seed,
            "split": self.config.report_split,
            "metrics": predictions.metrics(),
            "intervals": predictions.intervals(),
            "counts": {
                name: {"questions": len(split), "left_out": dict(split.counts)} for name, split in splits.items()
            },
            "timing": {
                "train_seconds": state.seconds,
                "seconds_per_step": state.seconds / max(1, state.step),
                "steps": state.step,
                "predict_seconds": predict_seconds,
            },
            "memory": {"peak_bytes": peak_memory(device)},
            "parameters": {"trainable": trainable, "total": total},
            "history": state.history,
            "stopped_early": state.stopped,
            "predictions": self.directory.predictions.name,
        }

    def _write(self, model: PeftModel, predictions: Predictions, result: dict[str, Any], made: Made | None) -> None:
        """Adapter and predictions first, the result last: who sees a result can count on the rest."""
        _save_adapter(model, self.directory.adapter)
        if made is not None and made.calibration is not None:
            made.calibration.save(self.directory.calibration)
        predictions.write(self.directory.predictions)
        write_json(self.directory.result, result)
        self.directory.checkpoint.unlink(missing_ok=True)


def _save_adapter(model: PeftModel, path: Path) -> None:
    """Write the adapter's directory, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tensor_failures(path):
        model.save_pretrained(str(partial))
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)


def _linear_modules(model: torch.nn.Module) -> list[str]:
    """Names of modules that can be adapted, without the path to them."""
    linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return sorted({name.rpartition(".")[2] for name in linear})


def _layer_indices(loaded: LoadedModel, adapter: AdapterConfig) -> list[int] | None:
    if adapter.layers == "all":
        return None
    count = loaded.model.config.num_hidden_layers
    return list(range(count - upper_layers(adapter.layers, count), count))


def _digest(config: RunConfig, parts: Mapping[str, Questions]) -> str:
    """Tells a run from others: its settings and the very tokens it learns from."""
    record = json.dumps(to_dict(config), sort_keys=True)
    digest = hashlib.sha256(record.encode())
    for name in ("train", "validation"):
        for item, encoded in zip(parts[name].items, parts[name].encoded, strict=True):
            digest.update(repr((encoded.prompt_ids, encoded.option_ids, item.gold)).encode())
    return digest.hexdigest()
