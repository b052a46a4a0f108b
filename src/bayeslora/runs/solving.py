"""Generate solutions to problems and check their answers. Interrupted work can be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.sampling import Sampling
from bayeslora.predict.generation import Writing, generate
from bayeslora.progress import Advance
from bayeslora.runs.answer_file import AnswerFile
from bayeslora.tasks.boxed import boxed_answer, same_answer
from bayeslora.tasks.problems import Problem, ask, encode_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Solver:
    """Generates solutions by greedy decoding from the distribution averaged over the draws.

    Attributes:
        model: with an adapter.
        tokenizer: of the model.
        sampling: draws of the weights to average.
        max_new_tokens: maximum length of a solution.
        batch_tokens: tokens of all solutions in a batch, including draws.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    max_new_tokens: int
    batch_tokens: int

    def __call__(
        self, problems: Sequence[Problem], skip: int = 0, advance: Advance | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield a record for every problem, longest text first, after the first ``skip``.

        Batches do not depend on ``skip``.
        """
        done = 0
        for batch in self._batches(problems):
            start, done = done, done + len(batch)
            if done <= skip:
                continue
            yield from self._solve(batch)[max(0, skip - start) :]
            if advance is not None:
                advance(done, len(problems))

    def _solve(self, problems: Sequence[Problem]) -> list[dict[str, Any]]:
        writing = Writing(max_new_tokens=self.max_new_tokens, seed=self.sampling.seed)
        prompts = [ask(problem, self.tokenizer) for problem in problems]
        samples, layers = self.sampling.samples, self.sampling.layers
        written = generate(self.model, self.tokenizer, prompts, writing, samples=samples, layers=layers)
        return [
            {
                "id": problem.id,
                "solution": solution.text,
                "tokens": len(solution.token_ids),
                "answer": boxed_answer(solution.text),
                "accepted": list(problem.answers),
                "right": same_answer(problem.answers, boxed_answer(solution.text)),
            }
            for problem, solution in zip(problems, written, strict=True)
        ]

    def _batches(self, problems: Sequence[Problem]) -> Iterator[list[Problem]]:
        draws = max(1, self.sampling.count(find_any_holder(self.model)))
        lengths = {problem.id: len(encode_problem(problem, self.tokenizer).prompt_ids) for problem in problems}
        order = sorted(problems, key=lambda problem: (-lengths[problem.id], problem.id))
        start = 0
        while start < len(order):
            row = draws * (lengths[order[start].id] + self.max_new_tokens)
            size = max(1, self.batch_tokens // row)
            yield order[start : start + size]
            start += size


def solve(
    solver: Solver, problems: Sequence[Problem], path: Path | None, settings: Mapping[str, Any], advance: Advance | None
) -> list[dict[str, Any]]:
    """Records of all problems. With a ``path`` they are written there one by one, and the same settings resume it."""
    if path is None:
        return list(solver(problems, advance=advance))
    with AnswerFile(path, dict(settings), force=path.exists()) as out:  # a complete file without a result is redone
        for record in solver(problems, out.done, advance):
            out.write(record)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def solving_metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of the problems with the right answer, and with any boxed answer."""
    return {
        "acc": sum(record["right"] for record in records) / len(records),
        "answered": sum(record["answer"] is not None for record in records) / len(records),
    }
