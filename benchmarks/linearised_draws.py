"""Draws of the linearised model beside draws of the model: the error, and the time against the number of draws.

python benchmarks/linearised_draws.py RUN --data-dir DATA --questions 64 --draws 4 16 64 --out result.json

A draw of the weights is a centre (the mean, or that of a component of a mixture) and a deviation. The linearised model adds
the deviation times the gradient at the centre to the log-probabilities of the centre. That takes a pass and one backward pass
for each option, once for every centre, however many draws there are. Both ways use the same draws. Times are those of all
questions, relative to one pass with one draw, taken in turns in one process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from records import command
from torch import Tensor

from bayeslora import load_run
from bayeslora.adapter.holder import PosteriorHolder
from bayeslora.adapter.sampling import Sampling
from bayeslora.bench.timing import time_in_turns
from bayeslora.number_checks import check_count
from bayeslora.posterior.base import Posterior
from bayeslora.posterior.factors import Factors
from bayeslora.predict.linearised.gradients import GRAPH_COST, differentiating, graph_batches, option_gradients
from bayeslora.predict.questions.options import Encoded
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.predict.questions.scores import score_questions
from bayeslora.runs.environment import describe_environment
from bayeslora.tasks import encode_items, load_task, require_gold


@dataclass(frozen=True)
class Centre:
    """A point that some of the draws lie around.

    Attributes:
        factors: the point, as one draw.
        rows: which draws they are.
        deviations: of those draws, ``A`` and ``B`` of every group.
    """

    factors: Factors
    rows: list[int]
    deviations: list[Tensor]


def centres(posterior: Posterior, draws: int, seed: int) -> list[Centre]:
    """The draws of a seed by their centres, which are the same draws without noise."""
    scale = posterior.scale

    def drawn() -> Factors:
        return posterior.draw(draws, torch.Generator().manual_seed(seed)).detach()

    try:
        around = drawn()
        posterior.scale = 0.0
        points = drawn()
    finally:
        posterior.scale = scale
    rows_of: dict[tuple[float, ...], list[int]] = {}
    for row in range(draws):
        sums = [_of(stack, row).double().sum().item() for stack in (*points.A, *points.B)]
        rows_of.setdefault(tuple(sums), []).append(row)
    found = []
    for rows in rows_of.values():
        pairs = zip((*around.A, *around.B), (*points.A, *points.B), strict=True)
        deviations = [torch.cat([_of(drawn, row) - _of(point, row) for row in rows], dim=1) for drawn, point in pairs]
        found.append(Centre(points.pick(rows[0]), rows, deviations))
    return found


def _of(stack: Tensor, row: int) -> Tensor:
    """One draw of a stack, which holds a single one where all are equal."""
    return stack[:, row : row + 1] if stack.shape[1] > 1 else stack


def linearised(scorer: Scorer, items: Sequence[Encoded], draws: int, seed: int, tokens: int) -> Tensor:
    """Log-probabilities ``[n, N, O]`` of the options under the draws of a seed, by the linearised model."""
    options = max(len(item.option_ids) for item in items)
    found = torch.full((draws, len(items), options), -torch.inf, dtype=torch.float64)
    with differentiating(scorer) as holder:
        (name,) = holder.active
        for centre in centres(holder.posterior(name), draws, seed):
            for rows in graph_batches(items, tokens // GRAPH_COST):
                scores = _around(scorer, holder, name, centre, [items[row] for row in rows])
                block = found[centre.rows]
                block[:, rows, : scores.shape[2]] = scores.double().cpu()
                found[centre.rows] = block
    return found


def _around(scorer: Scorer, holder: PosteriorHolder, name: str, centre: Centre, items: Sequence[Encoded]) -> Tensor:
    """The linearised scores of a batch under the draws around a centre, normalised over the options."""
    A, B = (
        tuple(stack.expand(-1, len(items), -1, -1).clone().requires_grad_() for stack in side)
        for side in (centre.factors.A, centre.factors.B)
    )
    holder.use({name: replace(centre.factors, A=A, B=B)})
    scores = scorer(items, blocks=len(items))
    by_option = option_gradients(scores.log_probabilities, scores.present, [*A, *B])
    changes = [
        sum(torch.einsum("lnri,ldri->dn", g, d) for g, d in zip(gradient, centre.deviations, strict=True))
        for gradient in by_option
    ]
    moved = scores.log_probabilities.detach() + torch.stack(changes, dim=2)  # type: ignore[arg-type]
    return moved.log_softmax(-1)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Error and time for every number of draws."""
    run = load_run(given.run, raw=True, device=given.device)
    items = load_task(run.config.task, given.data_dir).load(given.split).items[: given.questions]
    encoded = encode_items(items, run.loaded.tokenizer, run.config.data.scoring, run.config.data.max_tokens)
    gold = torch.tensor(require_gold(items))
    tokens = run.config.prediction.batch_tokens
    scorer = Scorer(run.model, run.loaded.tokenizer.pad_token_id or 0)

    def sampled(draws: int, seed: int = 0) -> Tensor:
        return score_questions(scorer, encoded, Sampling(draws, seed), batch_tokens=tokens).log_probabilities

    actions: dict[str, Any] = {"pass": lambda: sampled(1)}
    for draws in given.draws:
        actions[f"sampled {draws}"] = lambda draws=draws: sampled(draws)
        actions[f"linearised {draws}"] = lambda draws=draws: linearised(scorer, encoded, draws, 0, tokens)
    timings = time_in_turns(actions, scorer.device, repeats=given.repeats, warmup=1)
    rows = []
    for draws in given.draws:
        exact, line = (_averaged(it) for it in (sampled(draws), linearised(scorer, encoded, draws, 0, tokens)))
        rows.append(
            {
                "draws": draws,
                "largest_error": float((exact - line).abs().max()),
                "mean_error": float((exact - line).abs().sum(1).mean() / 2),
                "nll_sampled": _nll(exact, gold),
                "nll_linearised": _nll(line, gold),
                "time_sampled": timings[f"sampled {draws}"].ratio_to(timings["pass"])[0],
                "time_linearised": timings[f"linearised {draws}"].ratio_to(timings["pass"])[0],
            }
        )
    return {
        "schema": 1,
        "task": run.config.task,
        "method": run.config.method,
        "settings": dict(run.config.adapter.settings),
        "questions": len(items),
        "rows": rows,
        "environment": describe_environment(scorer.device),
    }


def _averaged(log_probabilities: Tensor) -> Tensor:
    return log_probabilities.double().cpu().exp().mean(0)


def _nll(probabilities: Tensor, gold: Tensor) -> float:
    return float(-probabilities.gather(1, gold.unsqueeze(1)).log().mean())


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--draws", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    for draws in given.draws:
        check_count("--draws", draws)
    check_count("--questions", given.questions)
    check_count("--repeats", given.repeats)
    record = measure(given)
    given.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for row in record["rows"]:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))


if __name__ == "__main__":
    command(main)
