"""Where a run or an adapter lies: in a local directory, or on the hub."""

from __future__ import annotations

from pathlib import Path

from bayeslora.errors import InputError, did_you_mean, first_line
from bayeslora.hub_access import hub_or_cache
from bayeslora.hub_names import is_hub_id
from bayeslora.runs.directory import RunDirectory

SETTINGS = "bayeslora.json"
"""Settings of a run that predictions need, beside an adapter on the hub."""

FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "calibration.json",
    "familiarity.safetensors",
    SETTINGS,
)
"""What is fetched of an adapter on the hub: no code and no pickles."""


def require_directory(path: str | Path) -> None:
    """Refuse a path where no run and no adapter can be; an id of the hub is not looked up."""
    place = Path(path).expanduser()
    if not place.exists():
        if is_hub_id(str(path)):
            return
        raise InputError(f"{path}: no such directory; give that of a run or an adapter, or an adapter's id on the hub")
    if not any((place / file).exists() for file in ("config.json", "adapter_config.json")):
        raise InputError(
            f"{path}: holds no run that can be used; give a directory that bayeslora train, PEFT or TRL has written"
        )


def find_directory(path: str | Path) -> RunDirectory:
    """The directory of a run or an adapter: a local one, or an adapter of the hub, which is fetched."""
    directory = RunDirectory(Path(path).expanduser())
    if directory.is_adapter and directory.path.resolve().name == "adapter":
        run = RunDirectory(directory.path.resolve().parent)
        if run.config.exists() and run.result.exists():
            return run  # its own adapter was meant
    return fetch_adapter(str(path)) if is_hub_id(str(path)) else directory


def fetch_adapter(name: str, revision: str | None = None) -> RunDirectory:
    """The directory of an adapter of the hub, which is fetched if it is not in the local cache."""
    from huggingface_hub import snapshot_download

    try:
        with hub_or_cache():
            return RunDirectory(Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES))))
    except Exception as error:  # the library raises many types; all of them mean that there is none
        parent = Path(name).parent
        near = did_you_mean(name, map(str, parent.iterdir())) if parent.is_dir() else ""
        raise InputError(
            f"{name}: is no directory here{near}, and no adapter could be loaded from the hub ({first_line(error)}); "
            "check the name and the network"
        ) from error
