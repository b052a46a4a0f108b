"""Settings held against each other on validation questions alone: how defaults are chosen.

python benchmarks/grid.py --data-dir DATA --tasks arc-easy winogrande-m --seeds 0 1 --workers 12 --runs grid --out grid.json \\
    --common "--model smollm2 --batch-tokens 8192 --max-train 1280" \\
    --variant "lora: --method lora" --variant "aimed: --aim 4" --variant "tied: --aim 0 --settings tied_mean=true"

A variant is a name and the words that ``bayeslora train`` would be told besides the common ones. No run sees a test question.
Given again, the command makes the runs that are missing; with ``--workers 0`` it writes what there is.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from records import command
from tempered import crossed

from bayeslora import metrics
from bayeslora.cli import parse
from bayeslora.cli.runs import Train
from bayeslora.predict.questions.predictions import read_predictions
from bayeslora.progress import reporter
from bayeslora.runs.config import RunConfig, resolve
from bayeslora.runs.directory import RunDirectory
from bayeslora.studies.execution import Execution
from bayeslora.studies.plan import Job
from bayeslora.studies.runner import Runner
from bayeslora.studies.study import task_name

METRICS = ("nll", "acc", "ece", "epistemic")


def configured(words: Sequence[str]) -> RunConfig:
    """The run that ``bayeslora train`` would make of these words."""
    verb = parse(["train", *words, "--report-split", "validation", "--out", "unused"])
    assert isinstance(verb, Train)
    return verb.experiment


def plan(given: argparse.Namespace) -> list[Job]:
    """A run for every variant, task and seed."""
    jobs = []
    for text in given.variant:
        name, _, words = text.partition(":")
        config = configured([*shlex.split(given.common), "--task", given.tasks[0], *shlex.split(words)])
        for task in given.tasks:
            place = given.runs / task_name(task) / name
            jobs += [
                Job(resolve(replace(config, task=task, seed=seed)), place / f"seed-{seed}", name=name)
                for seed in given.seeds
            ]
    return jobs


def row(job: Job, result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run: its validation metrics in the epoch that was kept, as they are and with a temperature that was
    fitted on the other half of the questions, and the NLLs of all epochs."""
    epochs = [epoch for epoch in result["history"] if "validation" in epoch]
    figures = {name: round(result["metrics"][name], 4) for name in METRICS}
    curves = {
        "train_nll": [round(epoch["train_nll"], 4) for epoch in epochs],
        "validation_nll": [round(epoch["validation"]["nll"], 4) for epoch in epochs],
    }
    _, probabilities, gold = read_predictions(RunDirectory(job.path).predictions)
    cooled, _ = crossed(probabilities, gold)
    figures |= {
        "tempered_nll": round(metrics.nll(cooled, gold), 4),
        "tempered_ece": round(metrics.ece(cooled, gold), 4),
    }
    seconds = {"training_seconds": round(result["timing"]["train_seconds"], 1)}
    return (
        {"variant": job.name, "task": task_name(job.config.task), "seed": job.config.seed} | figures | seconds | curves
    )


def main() -> None:
    """Make the runs, write their figures and print the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", required=True, metavar="NAME: WORDS")
    parser.add_argument("--common", default="--model smollm2", metavar="WORDS")
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--runs", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    jobs = plan(given)
    with reporter(quiet=False) as report:
        execution = Execution(data_dir=given.data_dir, device=given.device, workers=given.workers, report=report)
        with Runner(execution) as runner:
            runner.run(jobs)
    done = [(job, RunDirectory(job.path)) for job in jobs if RunDirectory(job.path).result.exists()]
    results = [(job, place.read_result()) for job, place in done]
    record = {
        "schema": 1,
        "split": "validation",
        "common": given.common,
        "variants": {name: words.strip() for name, _, words in (text.partition(":") for text in given.variant)},
        "rows": [row(job, result) for job, result in results],
        "failures": runner.failures,
        "environment": results[0][1]["environment"] if results else None,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print_means(record["rows"], [task_name(task) for task in given.tasks])


def print_means(rows: Sequence[dict[str, Any]], tasks: Sequence[str]) -> None:
    """Mean validation NLL over the seeds that there are, by variant and task, and the means of the tasks' means."""
    means = ("nll", "tempered_nll", "acc", "ece")
    print("| variant | " + " | ".join([*tasks, *means]) + " |\n|---|" + "---:|" * (len(tasks) + len(means)))
    for name in dict.fromkeys(it["variant"] for it in rows):
        mine = [[it for it in rows if it["variant"] == name and it["task"] == task] for task in tasks]
        cells = [f"{mean(it['nll'] for it in found):.3f} ({len(found)})" if found else "—" for found in mine]
        for metric in means:
            cells.append(f"{mean(mean(it[metric] for it in found) for found in mine if found):.4f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    command(main)
