"""One run on real questions, by lm-evaluation-harness with stock PEFT and by us: the same answers, and how fast.

python benchmarks/harness.py RUN --data-dir DATA --questions 150 --out result.json

RUN is one of method `lora`. The harness gets the run's LoRA as an ordinary adapter, the prompts and options as text, and does
its own tokenising, batching and padding; both score by the mean log-likelihood per token.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from peft import PeftModel

from bayeslora import load_model, load_run
from bayeslora.adapter.sampling import MEAN
from bayeslora.export.adapters import export_run
from bayeslora.predict.questions.scores import score_questions
from bayeslora.runs.environment import describe_environment
from bayeslora.runs.predictors import make_scorer
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import Item, encode_items, load_task, require_gold

T = TypeVar("T")


def timed(action: Callable[[], T]) -> tuple[T, float]:
    """What it gives, and how long it takes in seconds."""
    begun = time.perf_counter()
    return action(), time.perf_counter() - begun


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
    """Answers and times of both."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    run = load_run(given.run, raw=True)
    items = load_task(run.config.task, given.data_dir).load("test").items[: given.questions]
    gold = np.array(require_gold(items))
    scorer = make_scorer(run.model, run.loaded, run.config, None)
    lm = stock(run, given.batch_size)
    (
        asked(lm, items[:2]),
        score_questions(scorer, encode(run, items[:2]), MEAN, batch_tokens=4096),
    )  # warm-up

    def answer() -> Any:
        return score_questions(scorer, encode(run, items), MEAN, batch_tokens=given.batch_tokens)

    theirs, their_seconds = timed(lambda: asked(lm, items))
    ours, our_seconds = timed(answer)
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
        "seconds": {"lm-eval": their_seconds, "ours": our_seconds},
        "ratio": their_seconds / our_seconds,
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
