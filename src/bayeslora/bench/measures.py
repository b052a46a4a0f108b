"""The measurements: a training step, a prediction, questions, a token, a draw, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from bayeslora.adapter import find_holder
from bayeslora.bench.actions import Cold, Decode, Predict, Redraw, TrainStep, count_operators, peak_memory
from bayeslora.bench.config import LORA, BenchConfig, parse_batch
from bayeslora.bench.growth import measure_growth
from bayeslora.bench.questions import measure_questions
from bayeslora.bench.rows import Row
from bayeslora.bench.subjects import Subjects, trainable
from bayeslora.bench.timing import Timing, time_in_turns
from bayeslora.progress import Reporter

Measure = Callable[[Subjects, Reporter], Iterator[Row]]


def measure_train(subjects: Subjects, report: Reporter) -> Iterator[Row]:
    """Time a training step: forward, backward, clipping, AdamW; with the KL if the method has one."""
    for batch in subjects.config.batches:
        ids = subjects.tokens(*parse_batch(batch))
        models = {name: subjects.make(name).train() for name in (LORA, *subjects.config.methods)}
        steps = {name: TrainStep(model, ids, name != LORA) for name, model in models.items()}
        report.say(f"train {batch}")
        figures = {name: {"parameters": float(trainable(model))} for name, model in models.items()}
        yield from _timed(subjects, f"train {batch}", steps, figures)


def measure_predict(subjects: Subjects, report: Reporter) -> Iterator[Row]:
    """Time next-token prediction: one pass of PEFT's LoRA, and ours averaged over draws, which are cached between
    predictions."""
    yield from _by_draws(subjects, report, "predict", Predict)


def measure_redraw(subjects: Subjects, report: Reporter) -> Iterator[Row]:
    """Time the same prediction with draws that are made anew every time."""
    yield from _by_draws(subjects, report, "redraw", Redraw)


def measure_cold(subjects: Subjects, report: Reporter) -> Iterator[Row]:
    """Time the first prediction: load an adapter from its files, draw, predict."""
    config = subjects.config
    with TemporaryDirectory() as folder:
        places = {name: Path(folder) / str(place) for place, name in enumerate((LORA, *config.methods))}
        for name, place in places.items():
            subjects.make(name).save_pretrained(place)
        for batch in config.batches:
            ids = subjects.tokens(*parse_batch(batch))
            actions: dict[str, Callable[[], object]] = {LORA: Cold(subjects, places[LORA], ids, 0)}
            for name in config.methods:
                for samples in config.samples:
                    actions[f"{name}, N={samples}"] = Cold(subjects, places[name], ids, samples)
            report.say(f"cold {batch}")
            yield from _timed(subjects, f"cold {batch}", actions)


def measure_decode(subjects: Subjects, report: Reporter) -> Iterator[Row]:
    """Time greedy decoding with key-value caches."""
    yield from _by_draws(subjects, report, "decode", partial(Decode, new_tokens=subjects.config.new_tokens))


def _by_draws(
    subjects: Subjects, report: Reporter, what: str, action: Callable[[Any, Tensor, int, str], Callable[[], object]]
) -> Iterator[Row]:
    """Time PEFT's LoRA, the base model, and every method: merged, and for each number of draws and of draw layers."""
    config = subjects.config
    stock = subjects.make(LORA).eval()
    ours = {name: subjects.make(name).eval() for name in config.methods}
    plain = {"no adapter": subjects.bare().eval()}
    plain |= {
        f"{name}, merged": merged.eval() for name in config.methods if (merged := subjects.merged(name)) is not None
    }
    for batch in config.batches:
        ids = subjects.tokens(*parse_batch(batch))
        actions = {name: action(model, ids, 0, "all") for name, model in {LORA: stock, **plain}.items()}
        for name, model in ours.items():
            for layers in config.draw_layers:
                for samples in config.samples:
                    label = f"{name}, N={samples}" + ("" if layers == "all" else f", draws in {layers}")
                    actions[label] = action(model, ids, samples, layers)
        report.say(f"{what} {batch}")
        yield from _timed(subjects, f"{what} {batch}", actions)


def measure_draw(subjects: Subjects, report: Reporter) -> Iterator[Row]:
    """Time a draw of all weights with its KL, without and with its backward pass, and count their operators."""
    report.say("draw")
    for name in subjects.config.methods:
        posterior = find_holder(subjects.make(name)).posterior("default")

        def draw(posterior: Any = posterior) -> Tensor:
            factors = posterior.draw(1)
            total: Tensor = posterior.kl(factors).total
            return total + sum(stack.sum() for stack in (*factors.A, *factors.B))

        timings = time_in_turns(
            {"draw": draw, "draw and backward": lambda draw=draw: draw().backward()},  # type: ignore[misc]
            subjects.device,
            repeats=subjects.config.repeats,
            warmup=subjects.config.warmup,
        )
        for what, timing in timings.items():
            action = draw if what == "draw" else (lambda draw=draw: draw().backward())
            yield Row(what, name, {"median": timing.median, "operators": float(count_operators(action))})


def measure_memory(subjects: Subjects, report: Reporter) -> Iterator[Row]:
    """Measure peak memory of training steps: on CUDA all of it, elsewhere the tensors saved for the backward pass."""
    for batch in subjects.config.batches:
        report.say(f"memory {batch}")
        ids = subjects.tokens(*parse_batch(batch))
        baseline = 0.0
        for name in (LORA, *subjects.config.methods):
            model = subjects.make(name).train()
            size = float(peak_memory(TrainStep(model, ids, name != LORA), subjects.device))
            baseline = baseline or size
            yield Row(f"memory {batch}", name, {"bytes": size}, (size / baseline,) * 3)


def _timed(
    subjects: Subjects,
    what: str,
    actions: dict[str, Callable[[], object]] | dict[str, TrainStep],
    figures: dict[str, dict[str, float]] | None = None,
) -> Iterator[Row]:
    config: BenchConfig = subjects.config
    timings: dict[str, Timing] = time_in_turns(
        dict(actions), subjects.device, repeats=config.repeats, warmup=config.warmup
    )
    for who, timing in timings.items():
        own = (figures or {}).get(who, {})
        yield Row(what, who, {"median": timing.median, **own}, timing.ratio_to(timings[LORA]))


MEASURES: dict[str, Measure] = {
    "train": measure_train,
    "predict": measure_predict,
    "redraw": measure_redraw,
    "cold": measure_cold,
    "questions": measure_questions,
    "decode": measure_decode,
    "draw": measure_draw,
    "memory": measure_memory,
    "growth": measure_growth,
}
