"""Answer locally when sure, and ask somebody else when not: a cascade, and what it is worth at every threshold.

    python examples/cascade.py                                            a small run, trained here, and an expert who knows
    python examples/cascade.py RUN --task arc-challenge --data-dir DATA   a run of yours on real questions
    python examples/cascade.py RUN --url http://host/v1 --model NAME      with a second model behind an OpenAI-style endpoint

The expert is any function from a question to the number of a choice, or to nothing if it has no answer.
"""

import argparse
import json
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bayeslora import load_run
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import Item, load_task, make_urns, require_gold
from bayeslora.train import AdapterConfig, RunConfig, TrainingConfig, train

Expert = Callable[[Item], int | None]


def knowing(item: Item) -> int | None:
    """An expert who is always right, as a person might be: the best that deferring can bring."""
    return item.gold


def endpoint(url: str, model: str, key: str = "") -> Expert:
    """A second model that is asked for the letter of the answer."""

    def ask(item: Item) -> int | None:
        question = f"{item.prompt.text}\nReply with one of {', '.join(item.labels)} only."
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 4, "temperature": 0}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            said = json.load(reply)["choices"][0]["message"]["content"].strip()
        return next((k for k, label in enumerate(item.labels) if said.startswith(label)), None)

    return ask


def small_run(folder: Path) -> TrainedModel:
    """One that takes half a minute to train, on a few draws from urns."""
    (folder / "urns").mkdir()
    for split, size in (("train", 16), ("validation", 6), ("test", 24)):
        rows = [
            {"question": it.prompt.text, "choices": list(it.labels), "answer": it.labels[it.gold or 0]}
            for it in make_urns(split, size)
        ]
        (folder / "urns" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = RunConfig(
        model="smollm2",
        task=str(folder / "urns"),
        adapter=AdapterConfig(layers="last:2"),
        training=TrainingConfig(epochs=1, batch_size=8, cache_trunk=True),
    )
    train(config, folder / "run")
    return load_run(folder / "run")


def cascade_curve(model: TrainedModel, items: tuple[Item, ...], expert: Expert) -> tuple[list[float], list[float]]:
    """Share of the questions answered locally, and accuracy of the whole, from deferring all to deferring none."""
    gold = np.array(require_gold(items))
    predictions = model.predict(items)
    local = predictions.choices == gold
    order = np.argsort(-predictions.probabilities.max(axis=1), kind="stable")  # the surest first
    deferred = np.array([expert(items[row]) == gold[row] for row in order])
    right = local[order]
    answered = np.arange(len(items) + 1)
    correct = np.concatenate([[0], right.cumsum()]) + np.concatenate([deferred[::-1].cumsum()[::-1], [0]])
    return (answered / len(items)).tolist(), (correct / len(items)).tolist()


def main() -> None:
    """Draw the curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="directory of a trained run")
    parser.add_argument("--task", default=None)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--questions", type=int, default=40, help="how many of the test split")
    parser.add_argument("--url", default=None, help="of an OpenAI-style endpoint")
    parser.add_argument("--model", default="", help="its model")
    parser.add_argument("--key", default="", help="its key")
    parser.add_argument("--out", type=Path, default=None, help="where to write the curve as JSON")
    parser.add_argument("--figure", type=Path, default=None, help="where to draw the curve")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = load_run(given.run) if given.run else small_run(Path(folder))
        items = load_task(given.task or model.config.task, given.data_dir).load("test").items[: given.questions]
        expert = endpoint(given.url, given.model, given.key) if given.url else knowing
        share, accuracy = cascade_curve(model, items, expert)
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        row = round(level * len(items))
        print(f"{share[row]:4.0%} answered locally: accuracy {accuracy[row]:.3f}")
    if given.out:
        given.out.write_text(
            json.dumps({"questions": len(items), "share": share, "accuracy": accuracy}), encoding="utf-8"
        )
    if given.figure:
        figure = Figure(figsize=(5, 3.5), layout="constrained")
        axes = figure.add_subplot(xlabel="share answered locally", ylabel="accuracy of the cascade", ylim=(0, 1.02))
        axes.plot(share, accuracy)
        figure.savefig(given.figure, dpi=150)


if __name__ == "__main__":
    main()
