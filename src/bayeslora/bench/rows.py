"""What a measurement comes to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the table: what was measured for whom, and how that compares with PEFT's LoRA.

    Attributes:
        what: ``train 8x128``, ``predict 8x128``, ...
        who: the method.
        figures: numbers by name; times in seconds, sizes in bytes.
        ratio: to PEFT's LoRA in the same rounds, with quartiles, if it is a time.
    """

    what: str
    who: str
    figures: dict[str, float]
    ratio: tuple[float, float, float] | None = None
