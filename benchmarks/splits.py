"""Tasks with large validation parts for choosing settings, made of training and validation rows alone.

python benchmarks/splits.py DATA OUT

DATA is the directory of the benchmarks (see --data-dir). Writes OUT/{obqa,arcc,arce,wino,boolq}, each a directory of
splits for `--task`, with letters in all of them. The test split is the first 40 validation rows, only so that there is one: give
`--report-split validation`, as benchmarks/grid.py does.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
HELD_OUT = 1200
TEST = 40


def rows(data: Path, *names: str) -> Iterator[Row]:
    """The rows of some files of the benchmarks' directory."""
    for name in names:
        with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def with_options(row: Row) -> Row:
    """A question with options as it is."""
    return {key: row[key] for key in ("question", "choices", "labels", "answer")}


def with_a_blank(row: Row) -> Row:
    """A WinoGrande sentence as a question with two letters."""
    return {
        "question": f"Fill in the blank: {row['sentence']}",
        "choices": [row["option1"], row["option2"]],
        "labels": ["A", "B"],
        "answer": "AB"[int(row["answer"]) - 1],
    }


def yes_or_no(row: Row) -> Row:
    """A BoolQ question as one with two letters."""
    answer = "A" if row["answer"] in (True, "true", "True", "yes", 1) else "B"
    common = {"choices": ["yes", "no"], "labels": ["A", "B"], "answer": answer}
    return {"passage": row["passage"], "question": row["question"], **common}


def unique(found: Iterator[Row]) -> list[Row]:
    """Every question with its options once."""
    seen: dict[Any, Row] = {}
    for row in found:
        seen.setdefault((row["question"], tuple(row["choices"])), row)
    return list(seen.values())


def main() -> None:
    """Write the tasks."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    arc = ("train", "validation")
    tasks = {
        "obqa": (1280, map(with_options, rows(data, "openbookqa/train"))),
        "arcc": (700, map(with_options, rows(data, *(f"arc_challenge/{it}" for it in arc)))),
        "arce": (1000, map(with_options, rows(data, *(f"arc_easy/{it}" for it in arc)))),
        "wino": (1280, map(with_a_blank, rows(data, "winogrande/train_m"))),
        "boolq": (1280, map(yes_or_no, rows(data, "boolq/train"))),
    }
    rng = random.Random(7)
    for name, (size, found) in tasks.items():
        given = unique(found)
        rng.shuffle(given)
        held = given[size : size + HELD_OUT]
        for part, items in (("train", given[:size]), ("validation", held), ("test", held[:TEST])):
            path = out / name / f"{part}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in items), encoding="utf-8")
        print(f"{name}: {len(given[:size])} to learn from, {len(held)} to validate on")


if __name__ == "__main__":
    main()
