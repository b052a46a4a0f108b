"""Print the lowest versions that pyproject.toml declares, as pins for pip: what `make oldest` tests with.

    python tools/lowest.py > lowest.txt

torch is left out, as in tools/lock.py.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
for requirement in project["dependencies"]:
    name, bound = re.fullmatch(r"([\w.-]+)>=([\w.]+).*", requirement).groups()
    if name != "torch":
        print(f"{name}=={bound}")
