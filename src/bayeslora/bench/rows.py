"""Results of a measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One row of the table: what was measured for which method, and its ratio to PEFT's LoRA.

    Attributes:
        what: ``train 8x128``, ``predict 8x128``, ...
        who: the method.
        figures: numbers by name; times in seconds, sizes in bytes.
        ratio: time relative to PEFT's LoRA in the same rounds, with quartiles; only for times.
    """

    what: str
    who: str
    figures: dict[str, float]
    ratio: tuple[float, float, float] | None = None
