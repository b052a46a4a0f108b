"""Load a trained run, or an adapter that PEFT or TRL has saved, with its base model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from peft.utils import CONFIG_NAME

from bayeslora.adapter.loading import restored_on_failure
from bayeslora.errors import InputError
from bayeslora.layer_ranges import check_depth
from bayeslora.methods import find_method
from bayeslora.models import LoadedModel
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.calibrate.fit import scale_of, set_scale
from bayeslora.predict.questions.familiarity import Familiarity
from bayeslora.progress import Reporter, Silent
from bayeslora.runs.adapters import load_any_adapter, require_method, run_of_adapter
from bayeslora.runs.calibration import calibration_of_method
from bayeslora.runs.config import RunConfig, check_samples
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.location import find_directory, require_directory
from bayeslora.runs.predictors import load_base
from bayeslora.runs.saved_config import from_dict
from bayeslora.runs.trained import TrainedModel
from bayeslora.wording import counted


def _config_of(directory: RunDirectory, model: str | None) -> RunConfig:
    """Settings of a run, or those that an adapter implies."""
    if directory.is_adapter:
        return run_of_adapter(directory, model)
    try:
        config = from_dict(directory.read_config())
    except InputError as error:
        raise InputError(
            f"{directory.path}: holds no run that can be used: {error}; give the directory of a run, or of an adapter that PEFT "
            "has saved"
        ) from error
    return config if model is None else replace(config, model=model)


def _require_place(model: str, directory: RunDirectory) -> None:
    """Refuse a run whose base model was moved."""
    place = Path(model).expanduser()
    if place.is_absolute() and not place.exists():
        raise InputError(f"{directory.path}: its base model is no longer at {place}; give --model with its new place")


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
    model: str | None = None,
) -> TrainedModel:
    """Load a trained run, or an adapter that PEFT or TRL has saved.

    Args:
        path: the directory of a run or an adapter, or an adapter's id on the hub.
        device: as for :func:`bayeslora.load_model`.
        samples: weight draws per prediction; the run's own number by default, 0 for the posterior mean.
        draw_layers: layers in which draws differ, ``all``, ``last:K`` or a fraction; by default those chosen by
            calibration, or the run's own.
        raw: ignore the calibration.
        report: receives progress reports.
        loaded: the base model, if already loaded; call ``unload()`` on the run's ``model`` to restore it.
        trust_remote_code: run code from the base model's repository; never taken from the run's files.
        model: base model of an adapter that does not name it, or whose base model lies elsewhere.
    """
    require_directory(path)
    directory = find_directory(path)
    config = _config_of(directory, model)
    if not (directory.adapter / CONFIG_NAME).exists():
        if directory.result.exists():
            raise InputError(f"{directory.path}: its adapter is gone; restore it, or train again with --force")
        raise InputError(f"{directory.path}: has no adapter yet; give its train command again to go on with it")
    foreign = find_method(config.method).foreign()
    report = report or Silent()
    calibrated = not raw and directory.calibration.exists()
    calibration = Calibration.load(directory.calibration) if calibrated else Calibration()
    own = calibration_of_method(directory) if calibrated else Calibration()
    known = Familiarity.load(directory.familiarity) if calibrated and directory.familiarity.exists() else None
    samples = config.prediction.samples if samples is None else samples
    check_samples(samples)
    if draw_layers is None:
        draw_layers = calibration.draw_layers if calibrated else config.prediction.draw_layers
    check_depth(draw_layers, "draw_layers")
    if directory.is_adapter:
        report.say(
            f"{directory.path}: has no settings of a run; it predicts with {counted(samples, 'draw')}, and asks questions with "
            "choices in the prompt format of the benchmarks"
        )
    if loaded is None and model is None:
        _require_place(config.model, directory)
    loaded = loaded or load_base(config, device, trust_remote_code=trust_remote_code)
    with restored_on_failure(loaded.model):
        adapted = load_any_adapter(loaded, directory)
        if not directory.is_adapter:
            require_method(adapted, config, directory)
        if foreign is not None:
            foreign.attach(adapted)
        if directory.is_adapter and not directory.calibration.exists():
            own = calibration = Calibration(posterior_scale=scale_of(adapted))  # saved with the adapter
        set_scale(adapted, calibration.posterior_scale)
    return TrainedModel(directory, config, loaded, adapted, samples, draw_layers, calibration, own, report, known)
