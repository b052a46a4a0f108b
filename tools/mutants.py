"""Plant one-line bugs in the code, one at a time, and see that a test catches each.

    python tools/mutants.py                            # all of tools/mutants.toml
    python tools/mutants.py --only posterior tokens    # those of a package, or with a name
    python tools/mutants.py --list

Everything happens in a copy of the working tree. First the tests must pass there as they are; then each bug is planted, its
tests are run in a process of their own, and the line is restored. Exit codes: 0 all were caught, 1 some were not, 2 it could
not be tried.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory, TemporaryFile

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = ROOT / "tools" / "mutants.toml"
SOURCE = PurePosixPath("src/bayeslora")
TIMEOUT = 300.0


@dataclass(frozen=True)
class Mutant:
    """A bug to plant.

    Attributes:
        name: what is wrong, in a few words.
        file: where, below ``src/bayeslora``.
        old: a part of one line, which occurs once in the file.
        new: what takes its place.
        tests: that should catch it, below ``tests``: files, or single tests of them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def package(self) -> str:
        """What it belongs to: ``posterior``, ``predict/calibrate``, or ``files`` for a module by itself."""
        path = PurePosixPath(self.file)
        return path.stem if path.parent == PurePosixPath() else str(path.parent)

    def is_meant(self, words: Sequence[str]) -> bool:
        """Whether one of the words is its name or a package that it belongs to; without words all are meant."""
        return not words or any(word == self.name or f"{self.package}/".startswith(f"{word}/") for word in words)

    def path(self, tree: Path) -> Path:
        """Its file in a tree."""
        return tree / SOURCE / self.file


@dataclass(frozen=True)
class Run:
    """What became of some tests.

    Attributes:
        code: exit code of pytest; nothing if it took too long.
        said: what it printed.
        seconds: how long it took.
    """

    code: int | None
    said: str
    seconds: float

    @property
    def verdict(self) -> str:
        """What that says of a mutant. Tests that did not run at all say nothing."""
        return {0: "SURVIVED", 1: "caught", None: "timeout"}.get(self.code, "ERROR")

    @property
    def failed(self) -> str:
        """The test that failed, if one did."""
        found = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", self.said, re.MULTILINE)
        return found[1] if found else ""

    @property
    def end(self) -> str:
        """The last lines that were printed."""
        return "\n".join(f"    {line}" for line in self.said.splitlines()[-15:])


def read_mutants(path: Path = MUTANTS) -> list[Mutant]:
    """The mutants of a file, by package."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    mutants = [Mutant(name, **{**it, "tests": tuple(it["tests"])}) for name, it in entries.items()]
    return sorted(mutants, key=lambda mutant: mutant.package)  # which keeps the order of the file within a package


def find_mistakes(mutants: Sequence[Mutant], tree: Path) -> list[str]:
    """What is wrong with mutants, a line each: a part that is not in its file exactly once, or tests that are not there."""
    lines = []
    for mutant in mutants:
        path = mutant.path(tree)
        count = path.read_text(encoding="utf-8").count(mutant.old) if path.is_file() else 0
        if count != 1:
            lines.append(f"{mutant.name}: {mutant.old!r} is {count} times in {mutant.file}, and must be there once")
        if mutant.old == mutant.new or "\n" in mutant.old + mutant.new:
            lines.append(f"{mutant.name}: old and new must differ, and be parts of one line")
        missing = [it for it in mutant.tests if not (tree / "tests" / it.partition("::")[0]).exists()]
        lines += [f"{mutant.name}: there is no tests/{it}" for it in missing]
    return lines


def copy_tree(target: Path) -> None:
    """Copy all files of the working tree that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():  # and not removed since
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def environment(tree: Path, **more: str) -> dict[str, str]:
    """Of processes that are to import the copy, though the package may be installed from here."""
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(tree / "src"), **more}


def require_copy(tree: Path) -> None:
    """Refuse to go on if Python imports another tree than the copy."""
    command = [sys.executable, "-c", "import bayeslora; print(bayeslora.__file__)"]
    found = subprocess.run(command, cwd=tree, env=environment(tree), check=True, capture_output=True, text=True).stdout
    if not Path(found.strip()).is_relative_to(tree):
        sys.exit(f"Python imports {found.strip()} and not the copy in {tree}")


def run_tests(tree: Path, tests: Sequence[str], timeout: float, **more: str) -> Run:
    """Run tests of a tree until the first one fails. All processes that they have started end with them."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--color=no", "-m", "not slow"]
    command += [f"tests/{test}" for test in tests]
    start, code = time.monotonic(), None
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment(tree, **more), stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return Run(code, output.read(), time.monotonic() - start)


@contextmanager
def planted(mutant: Mutant, tree: Path) -> Iterator[None]:
    """Inside the block the bug is in the tree. The file's time comes back too: what was compiled of it is still good."""
    path = mutant.path(tree)
    text, stat = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def try_mutants(mutants: Sequence[Mutant], tree: Path, timeout: float) -> int:
    """Try all, with a line for each; the exit code."""
    copy_tree(tree)
    if mistakes := find_mistakes(mutants, tree):
        print("\n".join(mistakes), file=sys.stderr)
        return 2
    require_copy(tree)
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    before = run_tests(tree, tests, timeout * len(tests))
    if before.code != 0:
        print(f"the tests do not pass as they are:\n{before.end}", file=sys.stderr)
        return 2
    print(f"{'passed':8} {before.seconds:4.0f} s  without any bug", flush=True)
    verdicts = []
    for mutant in mutants:
        with planted(mutant, tree):
            run = run_tests(tree, mutant.tests, timeout, PYTHONDONTWRITEBYTECODE="1")
        verdicts.append(run.verdict)
        by = f"  ({run.failed})" if run.failed else ""
        print(f"{run.verdict:8} {run.seconds:4.0f} s  {mutant.package}: {mutant.name}{by}", flush=True)
        if run.verdict == "ERROR":
            print(run.end, flush=True)
    caught = verdicts.count("caught")
    print(f"{caught} of {len(verdicts)} were caught")
    return 0 if caught == len(verdicts) else 1


def main() -> int:
    """Read the words of the command line, and do it."""
    parser = argparse.ArgumentParser(description="Plant one-line bugs, and see that tests catch them.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names of mutants, or packages")
    parser.add_argument("--list", action="store_true", help="show the mutants and try none")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, metavar="SECONDS", help="for the tests of one mutant")
    words = parser.parse_args()
    mutants = [mutant for mutant in read_mutants() if mutant.is_meant(words.only)]
    if not mutants:
        parser.error(f"no mutant has the name or the package {' or '.join(words.only)}")
    if words.list:
        print("\n".join(f"{mutant.package}: {mutant.name}" for mutant in mutants))
        return 0
    with TemporaryDirectory(prefix="mutants-") as folder:
        return try_mutants(mutants, Path(folder).resolve(), words.timeout)


if __name__ == "__main__":
    sys.exit(main())
