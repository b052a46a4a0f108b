"""Results of `bayeslora evaluate` put together, as a record that `benchmarks/sections.py` prints.

python benchmarks/gather.py wikitext2/one-draw --out one-draw.json

Reads DIR/METHOD/seed-N/SPLIT/result.json and keeps of each what it measured and how.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

KEPT = ("seed", "samples", "metrics", "counts", "timing", "memory", "environment")


def gather(folder: Path) -> dict[str, Any]:
    """The record, with a part for each task and split."""
    sections: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/seed-*/*/result.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        section = sections.setdefault(f"{result['task']}, {result['split']}", {})
        method = section.setdefault(path.relative_to(folder).parts[0], {"runs": []})
        method["runs"].append({name: result[name] for name in KEPT})
    return {"schema": 1, "sections": sections}


def main() -> None:
    """Read and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.write_text(json.dumps(gather(given.folder), separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
