"""How a server tells other commands of its user that it runs: a file that only this user can read.

The file says what the server answers for, where it listens, and a secret. A server proves with the secret that it has written the
file, before a client tells it anything: its port may belong to another program, and another user, by now. The file lies in a
directory of this user, and is read only if it belongs to this user, nobody else can read it, and it is no link.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bayeslora import __version__
from bayeslora.atomic_files import write_json
from bayeslora.errors import InputError
from bayeslora.runs.directory import RunDirectory
from bayeslora.type_checks import check_kinds

SHARED = 0o077
"""Permissions of others."""

MOST_BYTES = 2**16
"""Maximum size of a file; ours have less than a thousand bytes."""

ROUNDING = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables on which the last digits of an answer depend."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What answers depend on, besides the question and the number of draws: those of equal values are equal.

    Attributes:
        run: real path of the run.
        state: its fingerprint.
        raw: whether its calibration is ignored.
        draw_layers: layers in which draws differ, if given.
        device: as given.
        model: base model, if given.
        trust_remote_code: whether the base model's code may run.
        version: of bayeslora.
        environment: variables of :data:`ROUNDING`.
    """

    run: str
    state: str
    raw: bool
    draw_layers: str | None
    device: str
    model: str | None
    trust_remote_code: bool
    version: str = __version__
    environment: Mapping[str, str | None] = field(
        default_factory=lambda: {name: os.environ.get(name) for name in ROUNDING}
    )

    @classmethod
    def of(cls, run: RunDirectory, model: str | None, **settings: Any) -> Served:
        """What is asked of a run in its present state; ``settings`` are the other fields."""
        local = None if model is None else Path(model).expanduser()
        base = model if local is None or not local.exists() else str(local.resolve())
        return cls(run=real_path(run), state=run.fingerprint(), model=base, **settings)


def real_path(run: RunDirectory) -> str:
    """The directory of a run, without links."""
    return str(run.path.resolve())


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """What a server tells about itself.

    Attributes:
        served: what it answers for.
        place: the device that it uses.
        samples: the run's own number of draws.
        host: address that it listens on.
        port: port that it listens on.
        token: bearer token of requests, if it wants one.
        idle: minutes without a question after which it ends, if it does.
        pid: of its process.
        secret: with which it proves that it wrote this.
    """

    served: Served
    place: str
    samples: int
    host: str
    port: int
    token: str | None = field(repr=False)
    idle: float | None = None
    pid: int = field(default_factory=os.getpid)
    secret: str = field(default_factory=secrets.token_urlsafe, repr=False)

    @property
    def path(self) -> Path:
        """The file."""
        return directory() / f"{socket.gethostname()}-{self.pid}.json"

    @property
    def url(self) -> str:
        """Where the server is."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def answers(self, wanted: Served) -> bool:
        """Whether its answers are those that are wanted."""
        own = asdict(self.served)
        return asdict(wanted) in (own, {**own, "device": self.place})

    def proof(self, challenge: str) -> str:
        """What only a server that knows the secret can reply to a challenge."""
        return hmac.new(self.secret.encode(), challenge.encode(), "sha256").hexdigest()

    def write(self) -> None:
        """Announce the server."""
        private_directory()
        write_json(self.path, asdict(self), 0o600)

    def remove(self) -> None:
        """Announce it no longer."""
        with suppress(OSError):
            self.path.unlink()


def directory() -> Path:
    """Where announcements lie: in this user's ``$XDG_RUNTIME_DIR``, else in the cache."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and _is_ours(Path(given)):
        return Path(given) / "bayeslora"
    from bayeslora.models.smollm2 import cache_directory

    return cache_directory() / "servers"


def private_directory() -> Path:
    """The same directory, which is made if necessary; refuses one that others can use."""
    place = directory()
    if not hasattr(os, "getuid"):
        raise InputError(
            "this system has no private files, which this needs; use bayeslora serve, and ask it over HTTP"
        )
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(place) or place.lstat().st_mode & SHARED:
        raise InputError(f"{place}: is not a private directory of this user; remove it, and it is created again")
    return place


def announced() -> Iterator[Announcement]:
    """Servers that this user's processes have announced on this machine; some may have died since."""
    place = directory()
    if not hasattr(os, "getuid") or not _is_ours(place) or place.lstat().st_mode & SHARED:
        return
    for path in sorted(place.glob("*.json")):
        found = _read(path)
        if found is not None and found.path == path:
            yield found


def _is_ours(place: Path) -> bool:
    """Whether a path is a directory of this user, and no link."""
    try:
        found = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _read(path: Path) -> Announcement | None:
    """The announcement in a file; ``None`` if it is none, or could be another user's work."""
    try:
        values = json.loads(_private_content(path))
        served = Served(**values.pop("served"))
        found = Announcement(served=served, **values)
        for part in (served, found):
            check_kinds(type(part), {name: getattr(part, name) for name in part.__dataclass_fields__})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return found


def _private_content(path: Path) -> bytes:
    """Content of a file that belongs to this user, who alone can read it; links are not followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & SHARED:
            raise PermissionError(f"{path}: is not a private file of this user")
        return file.read(MOST_BYTES)
