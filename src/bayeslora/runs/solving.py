"""Generate solutions to problems and check their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.sampling import Sampling
from bayeslora.predict.generation import Writing, generate
from bayeslora.runs.generating import BatchedGeneration
from bayeslora.tasks.boxed import boxed_answer, same_answer
from bayeslora.tasks.problems import Problem, ask, encode_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_solver(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    batch_tokens: int,
) -> BatchedGeneration[Problem]:
    """Generates solutions by greedy decoding from the distribution averaged over the draws."""
    writing = Writing(max_new_tokens=max_new_tokens, seed=sampling.seed)

    def solve(problems: Sequence[Problem]) -> list[dict[str, Any]]:
        prompts = [ask(problem, tokenizer) for problem in problems]
        written = generate(model, tokenizer, prompts, writing, samples=sampling.samples, layers=sampling.layers)
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

    return BatchedGeneration(
        solve,
        lambda problem: len(encode_problem(problem, tokenizer).prompt_ids),
        max(1, sampling.count(find_any_holder(model))),
        max_new_tokens,
        batch_tokens,
    )


def solving_metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of the problems with the right answer, and with any boxed answer."""
    return {
        "acc": sum(record["right"] for record in records) / len(records),
        "answered": sum(record["answer"] is not None for record in records) / len(records),
    }
