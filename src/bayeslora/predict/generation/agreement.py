"""Agreement between draws: every draw writes an answer of its own, and answers are grouped by what they say.

The entropy over the groups is the semantic entropy: it does not count different words for the same answer as doubt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bayeslora.tasks.answers import same_free_answer

Same = Callable[[str, str], bool]
"""Whether two answers say the same."""


@dataclass(frozen=True)
class Agreement:
    """How far the answers of the draws agree.

    Attributes:
        answers: what every draw wrote.
        groups: answers that say the same, as one of them and its share of the draws, the largest share first.
        share: of the draws that say the same as the answer given.
        others: those of the groups that say something else than the answer given.
    """

    answers: tuple[str, ...]
    groups: tuple[tuple[str, float], ...]
    share: float
    others: tuple[tuple[str, float], ...] = ()

    @property
    def semantic_entropy(self) -> float:
        """Entropy over the groups, in nats."""
        return max(0.0, -math.fsum(share * math.log(share) for _, share in self.groups))


def group_answers(answers: Sequence[str], same: Same = same_free_answer) -> list[list[int]]:
    """Indices of answers that say the same, the largest group first. An answer joins the first group whose first says so."""
    groups: list[list[int]] = []
    for index, answer in enumerate(answers):
        home = next((group for group in groups if same(answers[group[0]], answer)), None)
        if home is None:
            groups.append([index])
        else:
            home.append(index)
    return sorted(groups, key=len, reverse=True)


def find_agreement(given: str, answers: Sequence[str], same: Same = same_free_answer) -> Agreement:
    """Agreement of the draws' answers among each other and with the answer given."""
    groups = group_answers(answers, same)
    shares = tuple((answers[group[0]].strip(), len(group) / len(answers)) for group in groups)
    share = sum(same(given, answer) for answer in answers) / len(answers)
    return Agreement(tuple(answers), shares, share, tuple(it for it in shares if not same(given, it[0])))
