"""Work of a test in two processes that form a group, as ``torchrun`` would make one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

Work = Callable[[int, str], dict[Any, Any]]
"""Called with the rank and a folder of its own; a function of a module, since the processes import it."""


def on_two_processes(work: Work, folder: Path, port: int) -> list[dict[Any, Any]]:
    """What the work returns in each of them."""
    with torch.multiprocessing.get_context("spawn").Manager() as manager:
        shared = manager.dict()
        torch.multiprocessing.spawn(_member, (work, str(folder), port, shared), nprocs=2)
        return [shared[0], shared[1]]


def _member(rank: int, work: Work, folder: str, port: int, results: dict[int, Any]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    results[rank] = work(rank, f"{folder}/{rank}")
    torch.distributed.destroy_process_group()
