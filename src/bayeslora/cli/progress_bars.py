"""Progress bars that libraries draw, such as those of downloads: nobody sees them move in a file or a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

SWITCHES = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""Variables of the environment that libraries read when they are imported."""


def spare_progress_bars(arguments: Sequence[str]) -> None:
    """Switch the bars off for a quiet command, and where stderr is no terminal; what the user has set stays."""
    if "--quiet" in arguments or sys.stderr is None or not sys.stderr.isatty():
        for name in SWITCHES:
            os.environ.setdefault(name, "1")
