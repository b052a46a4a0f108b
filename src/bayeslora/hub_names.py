"""Names of models, data sets and adapters on the hub."""

from __future__ import annotations

import re
from pathlib import Path

_FORM = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def has_hub_form(name: str) -> bool:
    """Whether a name could be an id on the hub, such as ``org/name``."""
    return _FORM.fullmatch(name) is not None


def is_hub_id(name: str | None) -> bool:
    """Whether a name could be an id on the hub, and is no path here."""
    return name is not None and has_hub_form(name) and not Path(name).exists()
