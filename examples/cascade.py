"""Answer locally when sure, and ask somebody else when not: a cascade, and what it is worth at every threshold.

    python examples/cascade.py                                            a small run, trained here, and an expert who knows
    python examples/cascade.py RUN --task arc-challenge --data-dir DATA   a run of yours on real questions
    python examples/cascade.py RUN --url http://host/v1 --model NAME      with a second model behind an OpenAI-style endpoint

The expert is any function from questions to the numbers of its choices, or to nothing where it has no answer. At one threshold,
`bayeslora cascade` does this with a second run or an endpoint.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bayeslora import load_run
from bayeslora.remote.endpoint import Endpoint
from bayeslora.remote.expert import Expert
from bayeslora.runs.cascade import Second, cascade_curve
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import Item, load_task, make_urns, require_gold
from bayeslora.train import AdapterConfig, RunConfig, TrainingConfig, train


def knowing(items: Sequence[Item]) -> list[int | None]:
    """An expert who is always right, as a person might be: the best that deferring can bring."""
    return [item.gold for item in items]


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


def curve(model: TrainedModel, items: tuple[Item, ...], expert: Second) -> tuple[list[float], list[float]]:
    """Share of the questions answered locally, and accuracy of the whole, from deferring all to deferring none."""
    gold = np.array(require_gold(items))
    predictions = model.predict(items)
    known = np.array([choice == right for choice, right in zip(expert(items), gold, strict=True)])
    share, accuracy = cascade_curve(predictions.probabilities.max(axis=1), predictions.choices == gold, known)
    return share.tolist(), accuracy.tolist()


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
        expert = Expert(Endpoint(given.url, given.key or None), given.model) if given.url else knowing
        share, accuracy = curve(model, items, expert)
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
