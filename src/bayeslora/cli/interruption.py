"""Ctrl-C where no verb catches it, such as while libraries are imported: one line instead of a traceback."""

from __future__ import annotations

import sys
from types import TracebackType

INTERRUPTED = 130
"""Exit code of an interrupted command."""


_before = sys.excepthook


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _before(kind, error, trace)
        return
    print("bayeslora: interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)


sys.excepthook = _told
