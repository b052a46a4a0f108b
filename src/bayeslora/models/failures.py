"""Turn failures to load a model into one-line errors that a user can act on.

transformers wraps the hub's errors in general ones and explains them over many lines; the true cause is found by its
type along the chain of exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bayeslora.errors import InputError, first_line


def hub_failure(name: str, revision: str | None, error: BaseException) -> InputError | None:
    """The error for a failure of the hub, or ``None`` if it is another failure."""
    from huggingface_hub import errors

    causes = list(_chain(error))

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if caused_by(errors.GatedRepoError):
        return InputError(
            f"{name}: the model is gated; accept its terms on https://huggingface.co/{name} and log in with "
            "`hf auth login` (or set HF_TOKEN)"
        )
    if caused_by(errors.RevisionNotFoundError):
        return InputError(f"{name}: revision {revision!r} does not exist; see https://huggingface.co/{name}/commits")
    if caused_by(errors.RepositoryNotFoundError):
        return InputError(
            f"{name}: no such model on the hub, or a private one; check the name, or log in with `hf auth login`"
        )
    if caused_by(errors.HFValidationError):
        return InputError(f"{name!r} is no built-in model, no directory and no valid hub id such as 'org/model'")
    if caused_by(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        return InputError(
            f"{name}: not in the local cache, and the hub cannot be reached; run `hf download {name}` with a network, "
            "or pass a local directory"
        )
    return None


def remote_code_failure(name: str, error: BaseException) -> InputError | None:
    """The error for a model that needs remote code, or ``None`` if it does not."""
    if not any("trust_remote_code" in str(cause) for cause in _chain(error)):
        return None
    return InputError(
        f"{name}: needs code of its own; read it, and give --trust-remote-code (trust_remote_code=True in Python) if you "
        "trust it"
    )


def damaged_weights(name: str, directory: Path | None, error: BaseException) -> InputError:
    """The error for unreadable safetensors files, naming the first such file of a directory."""
    from safetensors import SafetensorError, safe_open

    what = "a file of its weights"
    for path in sorted(directory.glob("*.safetensors")) if directory else ():
        try:
            safe_open(path, framework="numpy")
        except SafetensorError:
            what = path.name
            break
    hint = "get the file again" if directory else "remove the model from the cache (`hf cache rm`) and load it again"
    return InputError(f"{name}: {what} is damaged or incomplete ({first_line(error)}); {hint}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those it was raised from."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__
