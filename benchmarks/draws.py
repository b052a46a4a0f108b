"""How far averages over few draws are from those over many: independent, antithetic and Latin-hypercube noise.

python benchmarks/draws.py RUN --data-dir DATA --out result.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from bayeslora import load_run
from bayeslora.adapter.sampling import Sampling
from bayeslora.predict.questions.scores import score_questions
from bayeslora.runs.environment import describe_environment
from bayeslora.runs.predictors import make_scorer
from bayeslora.tasks import encode_items, load_task, require_gold

KINDS = ("independent", "antithetic", "latin")


def main() -> None:
    """Measure and write the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--questions", type=int, default=None, help="how many; all by default")
    parser.add_argument("--samples", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--reference", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=16, help="estimates for each number of draws")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    run = load_run(given.run, raw=True)
    items = load_task(run.config.task, given.data_dir).load(given.split).items[: given.questions]
    gold = np.array(require_gold(items))
    encoded = encode_items(items, run.loaded.tokenizer, run.config.data.scoring, run.config.data.max_tokens)
    scorer = make_scorer(run.model, run.loaded, run.config, None)

    def probabilities(samples: int, seed: int, variates: str) -> np.ndarray:
        scores = score_questions(
            scorer,
            encoded,
            Sampling(samples, seed, variates=variates),
            batch_tokens=run.config.prediction.batch_tokens,
        )
        return np.exp(scores.predictive)

    truth = probabilities(given.reference, 10**6, "independent")
    rows = []
    for samples in given.samples:
        for kind in KINDS:
            found = [probabilities(samples, seed, kind) for seed in range(given.repeats)]
            errors = [float(np.sqrt(np.mean((p - truth)[truth > 0] ** 2))) for p in found]
            nlls = [float(-np.log(p[np.arange(len(gold)), gold]).mean()) for p in found]
            row = {"samples": samples, "variates": kind, "rmse": float(np.mean(errors))}
            row |= {"rmse_spread": float(np.std(errors)), "nll": float(np.mean(nlls))}
            print(
                f"N={samples} {kind:12} error {row['rmse']:.4f} ± {row['rmse_spread']:.4f}, NLL {row['nll']:.4f}",
                flush=True,
            )
            rows.append(row)
    record = {
        "schema": 1,
        "task": run.config.task,
        "split": given.split,
        "questions": len(items),
        "reference": given.reference,
        "repeats": given.repeats,
        "nll": float(-np.log(truth[np.arange(len(gold)), gold]).mean()),
        "rows": rows,
        "environment": describe_environment(scorer.device),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
