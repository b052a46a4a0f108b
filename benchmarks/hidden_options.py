"""Questions of a benchmark with their options hidden, to be answered in free text.

python benchmarks/hidden_options.py DATA OUT --benchmark arc_easy

DATA is the directory of the benchmarks (see --data-dir). Writes OUT/{train,validation,test}.jsonl with rows of question and
answer for `bayeslora train --task OUT`. Questions that cannot be asked without their options ("Which of these ...") are left
out, as are those whose answer has many words, which nobody words alike. OUT/counts.json says how many.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from records import command
from splits import rows

SPLITS = ("train", "validation", "test")
ABOUT_OPTIONS = re.compile(
    r"\b(?:of|the) (?:these|those|following|choices|options|answers|statements)\b"
    r"|\bthese (?:choices|options|answers|statements)\b"
    r"|\b(?:which|what) (?:statement|sentence|answer|choice|option|pair|list|diagram|graph|table)s?\b"
    r"|\b(?:shown|listed) (?:below|above)\b|\bbelow:|\bnot\b[^.]*\?$|\bexcept\b",
    re.IGNORECASE,
)
"""What gives a question away that only makes sense beside its options."""

ABOUT_OTHERS = re.compile(
    r"\b(?:all|none|both|neither|either) of (?:these|the above|them)\b|^(?:all|none)\b", re.IGNORECASE
)
"""Answers that speak of other options."""


def flaw(row: dict[str, Any], most_words: int) -> str | None:
    """Why a question is left out, if it is."""
    answer = right_option(row)
    if ABOUT_OPTIONS.search(row["question"]):
        return "asks about its options"
    if ABOUT_OTHERS.search(answer):
        return "is answered by other options"
    return f"answer of more than {most_words} words" if len(answer.split()) > most_words else None


def right_option(row: dict[str, Any]) -> str:
    """The text of the right option, without the full stop that some have."""
    return str(row["choices"][row["labels"].index(row["answer"])]).strip().rstrip(".")


def hide(given: Iterable[dict[str, Any]], most_words: int, seen: set[str]) -> tuple[list[dict[str, str]], Counter[str]]:
    """Rows of question and answer, and how many were left out for each reason; ``seen`` holds questions of other splits."""
    kept, left_out = [], Counter[str]()
    for row in given:
        why = flaw(row, most_words) or ("asked before" if row["question"] in seen else None)
        seen.add(row["question"])
        if why is None:
            kept.append({"id": row["id"], "question": row["question"], "answer": right_option(row)})
        else:
            left_out[why] += 1
    return kept, left_out


def main() -> None:
    """Write the splits and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--benchmark", default="arc_easy", choices=["arc_easy", "arc_challenge", "openbookqa"])
    parser.add_argument("--most-words", type=int, default=3, help="longest answer")
    parser.add_argument("--most-rows", type=int, default=None, help="of each split, the first ones; all by default")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    counts: dict[str, Any] = {"benchmark": given.benchmark, "most_words": given.most_words}
    seen: set[str] = set()
    for split in SPLITS:
        kept, left_out = hide(rows(given.data, f"{given.benchmark}/{split}"), given.most_words, seen)
        written = kept[: given.most_rows]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written)
        (given.out / f"{split}.jsonl").write_text(text, encoding="utf-8")
        counts[split] = {"written": len(written), "kept": len(kept), "left_out": dict(left_out)}
        print(split, counts[split])
    (given.out / "counts.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command(main)
