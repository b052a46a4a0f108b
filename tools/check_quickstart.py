"""Hold the figures of a quickstart against the kept record of the same seed.

    python tools/check_quickstart.py bayeslora-quickstart

On the platform of the record, with the same torch and as many threads, they are the same to three digits. Elsewhere processors
round otherwise, training goes other ways, and figures are the same within :data:`ELSEWHERE`. Bayesian-LoRA is better
calibrated than LoRA everywhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent.parent / "benchmarks/results/quickstart"
SAME = {"acc": 5e-4, "nll": 5e-4, "ece": 5e-4, "distance_to_truth": 5e-4}
"""How far apart two runs on one platform may be."""
ELSEWHERE = {"acc": 0.08, "nll": 0.08, "ece": 0.06, "distance_to_truth": 0.05}
"""How far apart runs on two platforms may be."""


def platform_of(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides the last bits of a result: machine, build of torch, device, threads."""
    made = result["environment"]
    return made["platform"], made["packages"]["torch"], made["device"], made["threads"]


def differences(found: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """What is not as it should be, one line each; both hold the results of the two methods by name."""
    lines = []
    for method, record in kept.items():
        result = found[method]
        same = platform_of(result) == platform_of(record)
        for name, bound in (SAME if same else ELSEWHERE).items():
            ours, theirs = result["metrics"][name], record["metrics"][name]
            if not abs(ours - theirs) <= bound:
                where = "on the platform of the record" if same else "between platforms"
                lines.append(f"{method}: {name} is {ours:.4f} and was {theirs:.4f}; {where} {bound:g} is allowed")
    lora, bayesian = (found[method]["metrics"] for method in ("lora", "bayesian-lora"))
    for name in ("nll", "ece"):
        if not bayesian[name] < lora[name]:
            lines.append(f"{name} of bayesian-lora, {bayesian[name]:.4f}, is not below that of lora, {lora[name]:.4f}")
    return lines


def main() -> None:
    """Read both, and end with 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what bayeslora quickstart has written")
    directory = parser.parse_args().directory
    methods = ("lora", "bayesian-lora")
    found = {it: json.loads((directory / it / "result.json").read_text(encoding="utf-8")) for it in methods}
    seed = found["lora"]["seed"]
    kept = json.loads((RECORDS / f"seed-{seed}.json").read_text(encoding="utf-8"))
    if lines := differences(found, kept):
        raise SystemExit("\n".join(lines))
    where = "same platform" if platform_of(found["lora"]) == platform_of(kept["lora"]) else "another platform"
    print(f"{directory}: as the record of seed {seed} says ({where})")


if __name__ == "__main__":
    main()
