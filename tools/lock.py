"""Write the lock file: every package of this environment at its version, with the hashes of all its files on the index.

    python tools/lock.py requirements.lock

``make install`` then installs exactly these, and pip refuses a file with another hash. Every package must have a file for
x86-64 and one for ARM. torch is left out: which build of it fits (CPU, CUDA) is the machine's affair, see constraints.txt.
"""

from __future__ import annotations

import os
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote

from pip._internal.models.index import PyPI

INDEX = os.environ.get("PIP_INDEX_URL", PyPI.simple_url)
LEFT_OUT = {"bayeslora", "pip", "setuptools", "wheel", "torch"}
MACHINES = ("x86_64", "aarch64")


class Links(HTMLParser):
    """Names and hashes of the files on a page of a package index."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: dict[str, str] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note a link."""
        address = dict(attributes).get("href") or ""
        path, _, fragment = address.partition("#")
        if tag == "a" and fragment.startswith("sha256="):
            self.hashes[unquote(path.rpartition("/")[2])] = fragment.removeprefix("sha256=")


def locked(name: str, version: str) -> str:
    """The lines of one package."""
    with urllib.request.urlopen(f"{INDEX.rstrip('/')}/{name}/", timeout=60) as page:
        links = Links()
        links.feed(page.read().decode())
    stem = re.compile(rf"{normal(name)}-{re.escape(version)}(-.*\.whl|\.tar\.gz|\.zip)")
    files = {
        file: digest for file, digest in links.hashes.items() if stem.fullmatch(re.sub(r"^(.+?)(?=-\d)", _normal, file))
    }
    for machine in MACHINES:
        if not any(installs(file, machine) for file in files):
            raise SystemExit(f"{name}=={version}: the index has no file of it with a hash for Linux on {machine}")
    return " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in sorted(files.values()))])


def installs(file: str, machine: str, own: str = f"cp3{sys.version_info.minor}") -> bool:
    """Whether a Python can install a file on such a machine: from source, or a wheel for all or for that machine."""
    if not file.endswith(".whl"):
        return True
    python, abi, platforms = file.removesuffix(".whl").split("-")[-3:]
    fits = python.startswith("py") or own in python.split(".") or abi == "abi3"
    return fits and any(
        it == "any" or (it.startswith(("manylinux", "linux")) and it.endswith(machine)) for it in platforms.split(".")
    )


def normal(name: str) -> str:
    """A package's name as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _normal(found: re.Match[str]) -> str:
    return normal(found[0])


def main(out: Path) -> None:
    """Write the file."""
    found = {normal(it.metadata["Name"]): it.version for it in distributions()}
    wanted = sorted((name, version) for name, version in found.items() if name not in LEFT_OUT)
    with ThreadPoolExecutor(8) as pool:
        lines = list(pool.map(lambda pair: locked(*pair), wanted))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    head = f"# Made by tools/lock.py for Python {python} on Linux; install torch first, then this with --no-deps.\n"
    out.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{out}: {len(lines)} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
