"""One run on real questions, by lm-evaluation-harness with stock PEFT and by us: the same answers, and how fast.

python benchmarks/harness.py RUN --data-dir DATA --questions 150 --samples 4 --out result.json

RUN is a trained run. The harness gets its mean as an ordinary LoRA adapter, the prompts and options as text, and does its own
tokenising, batching and padding; both score by the mean log-likelihood per token. Answers are those of the mean. With
`--samples` the times of as many weight draws are there too, drawing included.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from peft import PeftModel

from bayeslora import load_model, load_run
from bayeslora.adapter.sampling import MEAN, Sampling
from bayeslora.bench.timing import time_in_turns
from bayeslora.export.adapters import export_run
from bayeslora.predict.questions.scores import score_questions
from bayeslora.runs.environment import describe_environment
from bayeslora.runs.predictors import make_scorer
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import Item, encode_items, load_task, require_gold

HARNESS = "lm-eval, one pass"


def stock(run: TrainedModel, rows: int) -> HFLM:
    """The harness around the base model with the run's LoRA as PEFT loads it."""
    base = load_model(run.config.model, device=str(run.loaded.model.device), dtype=run.config.loading.dtype)
    with tempfile.TemporaryDirectory() as folder:
        export_run(run, 0, Path(folder) / "adapters")
        model = PeftModel.from_pretrained(base.model, str(Path(folder) / "adapters" / "mean")).eval()
    return HFLM(pretrained=model, tokenizer=base.tokenizer, batch_size=rows)


def asked(lm: HFLM, items: Sequence[Item]) -> list[list[float]]:
    """Log-likelihoods of all options, as the harness computes them."""
    requests = [
        Instance("loglikelihood", {}, (item.prompt.text, option), 0) for item in items for option in item.options
    ]
    found = iter(lm.loglikelihood(requests, disable_tqdm=True))
    return [[next(found)[0] for _ in item.options] for item in items]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Answers of both, and their times in turns."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    run = load_run(given.run, raw=True)
    items = load_task(run.config.task, given.data_dir).load("test").items[: given.questions]
    gold = np.array(require_gold(items))
    scorer = make_scorer(run.model, run.loaded, run.config, None)
    lm = stock(run, given.batch_size)

    def answer(sampling: Sampling) -> Any:
        return score_questions(scorer, encode(run, items), sampling, batch_tokens=given.batch_tokens)

    theirs, ours = asked(lm, items), answer(MEAN)
    drawn = {f"ours, N={count}": Sampling(count) for count in given.samples}
    actions = {HARNESS: lambda: asked(lm, items), "ours, one pass": lambda: answer(MEAN)}
    actions |= {who: lambda sampling=sampling: answer(sampling) for who, sampling in drawn.items()}
    timings = time_in_turns(actions, scorer.device, repeats=given.repeats, warmup=given.warmup)
    lengths = [[len(option) for option in one.option_ids] for one in encode(run, items)]
    their_choice = np.array([np.argmax(np.divide(*pair)) for pair in zip(theirs, lengths, strict=True)])
    our_choice = np.asarray(ours.predictive).argmax(axis=1)
    totals = np.asarray(ours.totals[0])
    return {
        "schema": 1,
        "task": run.config.task,
        "questions": len(items),
        "accuracy": {"lm-eval": float(np.mean(their_choice == gold)), "ours": float(np.mean(our_choice == gold))},
        "same_answers": float(np.mean(their_choice == our_choice)),
        "largest_difference": max(float(np.abs(totals[row, : len(one)] - one).max()) for row, one in enumerate(theirs)),
        "seconds": {who: timing.median for who, timing in timings.items()},
        "questions/s": {who: len(items) / timing.median for who, timing in timings.items()},
        "ratio": {who: timings[HARNESS].median / timing.median for who, timing in timings.items() if who != HARNESS},
        "batch": {"lm-eval, rows": given.batch_size, "ours, tokens": given.batch_tokens},
        "environment": describe_environment(scorer.device),
    }


def encode(run: TrainedModel, items: Sequence[Item]) -> Any:
    """Prompts and options in tokens."""
    return encode_items(items, run.loaded.tokenizer, run.config.data.scoring, run.config.data.max_tokens)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--questions", type=int, default=None, help="of the test split; all by default")
    parser.add_argument("--samples", type=int, nargs="*", default=[], help="numbers of weight draws to time")
    parser.add_argument("--repeats", type=int, default=1, help="timed rounds")
    parser.add_argument("--warmup", type=int, default=0, help="untimed rounds before them")
    parser.add_argument("--batch-size", type=int, default=8, help="requests at once, for the harness")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="tokens at once, for us")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    record = measure(given)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: record[name] for name in ("accuracy", "same_answers", "largest_difference", "ratio")}))


if __name__ == "__main__":
    main()
