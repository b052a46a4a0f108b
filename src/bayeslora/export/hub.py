"""Upload a run's adapter to the hub, with its model card, its calibration and the settings that predictions need."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

from bayeslora.errors import InputError, first_line
from bayeslora.hub_names import is_hub_id
from bayeslora.predict.calibrate import Calibration
from bayeslora.runs.adapters import portable_settings, read_object
from bayeslora.runs.card import make_card, public_name
from bayeslora.runs.card_figure import FIGURE
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.location import FILES, SETTINGS
from bayeslora.runs.result import RunResult

CARD = "README.md"


def push_run(path: Path, repository: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload the adapter of a finished run; returns its address. Neither paths of this machine nor predictions are uploaded."""
    directory = RunDirectory(path.expanduser())
    if not directory.result.exists():
        raise InputError(f"{path}: holds no finished run; give a directory that bayeslora train has written")
    for needed in (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME):
        if not (directory.adapter / needed).exists():
            raise InputError(f"{directory.adapter}: has no {needed}; restore it, or give a directory with an adapter")
    from huggingface_hub import HfApi

    result = directory.read_result()
    with TemporaryDirectory() as folder:
        place = Path(folder)
        for name in (*FILES, FIGURE):
            if (directory.adapter / name).exists():
                shutil.copyfile(directory.adapter / name, place / name)
        base = _without_local_base(directory, place / CONFIG_NAME)
        _without_local_task(directory, place / directory.calibration.name, result)
        figure = FIGURE if (place / FIGURE).exists() else None
        (place / CARD).write_text(make_card(result, base, figure), encoding="utf-8")
        (place / SETTINGS).write_text(json.dumps(portable_settings(result), indent=2) + "\n", encoding="utf-8")
        try:
            api = HfApi(token=token)
            api.create_repo(repository, private=private, exist_ok=True)
            done = api.upload_folder(
                repo_id=repository, folder_path=str(place), commit_message="Upload the adapter of a run"
            )
        except Exception as error:  # the library raises many types: no network, no token, no permission
            raise InputError(
                f"{repository}: cannot be uploaded ({first_line(error)}); check the name, the network and your token "
                "(hf auth login)"
            ) from error
    return str(done)


def _without_local_task(directory: RunDirectory, path: Path, result: RunResult) -> None:
    """Keep of the task that a calibration was chosen on its name alone: whether ``a/b`` was a path cannot be seen any more."""
    if directory.calibration.exists():
        calibration = Calibration.load(directory.calibration)
        if calibration.task is not None:
            own = calibration.task == result.config["task"]
            title = result.title if own and result.title else public_name(calibration.task).rpartition("/")[2]
            replace(calibration, task=title).save(path)


def _without_local_base(directory: RunDirectory, path: Path) -> str | None:
    """Remove the base model from an adapter's configuration if that is a directory here; returns its name on the hub."""
    config = read_object(directory.adapter / CONFIG_NAME)
    name = config.get("base_model_name_or_path")
    if is_hub_id(name):
        return str(name)
    path.write_text(json.dumps({**config, "base_model_name_or_path": None}, indent=2) + "\n", encoding="utf-8")
    return None
