"""Whatever the moment a command is killed at, no broken file is taken for a good one, and the same command ends the work."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from faults.commands import COMMANDS, Sources, require_whole
from faults.processes import Forked

pytestmark = pytest.mark.system

KILLS = int(os.environ.get("KILLS", "1"))


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_killed_command_is_no_loss(verb: str, sources: Sources, tmp_path: Path) -> None:
    """Killed at moments spread over the time that it takes undisturbed (``KILLS=20`` for more of them)."""
    command = COMMANDS[verb]
    undisturbed = tmp_path / "undisturbed"
    for out in (tmp_path / "first", undisturbed):  # the first one does what is done once in a process
        began = time.monotonic()
        assert Forked(command.words(sources, out)).wait() == 0
        seconds = time.monotonic() - began
    rng, landed = random.Random(0), 0
    for number in range(10 * KILLS):
        out = tmp_path / f"killed-{number}"
        process = Forked(command.words(sources, out))
        if process.wait(seconds * (number % KILLS + rng.random()) / KILLS) is not None:
            continue  # it was faster
        process.kill()
        landed += 1
        if out.exists():
            require_whole(out)
        if not (command.appears_whole and out.exists()):
            assert Forked(command.words(sources, out)).wait() == 0
            assert [path.name for path in tmp_path.iterdir() if out.name in path.name] == [out.name]
        assert command.outcome(out) == command.outcome(undisturbed)
        if landed == KILLS:
            return
    pytest.fail(f"only {landed} kills came in time")
