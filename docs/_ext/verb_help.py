"""The reference of the command line: what ``bayeslora VERB --help`` prints, taken at build time."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

from bayeslora.cli import VERBS, main

PAGE = "cli"
WIDTH = "100"
SECTION = """
## {title}

```text
{help}
```
"""


def printed(*arguments: str) -> str:
    """What the command line prints for these arguments, without colours and trailing blanks."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*arguments, "--help"])
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def add_help(app: Any, docname: str, source: list[str]) -> None:
    """A section for each verb at the end of the page."""
    if docname != PAGE:
        return
    os.environ.update(COLUMNS=WIDTH, NO_COLOR="1")
    for verb in VERBS:
        source[0] += SECTION.format(title=f"bayeslora {verb}", help=printed(verb))


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", add_help)
    return {"parallel_read_safe": True}
