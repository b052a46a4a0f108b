"""Free answers of a run with all that scores of uncertainty are computed from, for ``benchmarks/rivals.py``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from peft import PeftModel
from rival_scores import LEAST, TOP, Answered, Sample
from torch import Tensor

from bayeslora import load_run
from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.sampling import MEAN, Sampling, sampled
from bayeslora.errors import InputError
from bayeslora.predict.generation import Generation, Prompt, Writing, encode_prompts, generate
from bayeslora.predict.generation.confidence import AnswerWriter, WrittenAnswer
from bayeslora.predict.generation.results import End, Record
from bayeslora.predict.mc import averaging
from bayeslora.runs.card import public_name
from bayeslora.runs.environment import describe_environment
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import AnswerTask
from bayeslora.tasks.answers import FreeQuestion, answer_f1, ask_freely, exact_match

T = TypeVar("T")
SPLITS = ("validation", "test")


@dataclass
class Clock:
    """Seconds of every stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Any:
        """Add the time of the block to a stage."""
        begun = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begun


def in_batches(items: Sequence[Any], size: int, action: Callable[[Sequence[Any]], Sequence[T]]) -> list[T]:
    """Results for all items in their order, made in batches of similar length."""
    order = sorted(range(len(items)), key=lambda k: len(repr(items[k])), reverse=True)
    found: dict[int, T] = {}
    for start in range(0, len(order), size):
        chunk = order[start : start + size]
        found.update(zip(chunk, action([items[k] for k in chunk]), strict=True))
    return [found[k] for k in range(len(items))]


@dataclass(frozen=True)
class Generating:
    """Generates answers with a run.

    Attributes:
        run: the model.
        rows: sequences at a time.
        tokens: longest answer.
        seed: of draws and samples.
    """

    run: TrainedModel
    rows: int
    tokens: int
    seed: int

    def _write(self, prompts: Sequence[Prompt], draws: int, seed: int, temperature: float = 0.0) -> list[Generation]:
        writing = Writing(max_new_tokens=self.tokens, temperature=temperature, seed=seed)
        model, tokenizer = self.run.model, self.run.loaded.tokenizer

        def write(some: Sequence[Prompt]) -> list[Generation]:
            top = 0 if temperature else TOP
            return generate(model, tokenizer, some, writing, samples=draws, layers=self.run.draw_layers, top=top)

        return in_batches(prompts, max(1, self.rows // max(1, draws)), write)

    def answers(self, prompts: Sequence[Prompt], draws: int) -> list[Generation]:
        """Answers decoded greedily from the average of the draws; 0 uses the mean."""
        return self._write(prompts, draws, self.seed)

    def assess(self, prompts: Sequence[Prompt], generations: Sequence[Generation], draws: int) -> list[WrittenAnswer]:
        """Our confidence in these answers."""
        sampling = Sampling(draws, self.seed, self.run.draw_layers)
        writing = Writing(max_new_tokens=self.tokens)
        writer = AnswerWriter(self.run.model, self.run.loaded.tokenizer, sampling, writing)

        def assess(pairs: Sequence[tuple[Prompt, Generation]]) -> list[WrittenAnswer]:
            return writer.assess([it for it, _ in pairs], [it for _, it in pairs])

        return in_batches(list(zip(prompts, generations, strict=True)), max(1, self.rows // max(1, draws)), assess)

    def samples(self, prompts: Sequence[Prompt], count: int, *, one_network: bool) -> list[list[Generation]]:
        """Answers sampled at temperature 1, each from a draw of its own, or all from the only network."""
        if one_network:
            repeated = [prompt for prompt in prompts for _ in range(count)]
            found = self._write(repeated, 0, self.seed, temperature=1.0)
            return [found[start : start + count] for start in range(0, len(found), count)]
        return in_batches(prompts, max(1, self.rows // count), lambda some: self._sample_by_draw(some, count))

    @torch.no_grad()
    def _sample_by_draw(self, prompts: Sequence[Prompt], count: int) -> list[list[Generation]]:
        """An answer of every draw to every prompt, all in one batch."""
        model, tokenizer = self.run.model, self.run.loaded.tokenizer
        writing = Writing(max_new_tokens=self.tokens, temperature=1.0, seed=self.seed)
        ends = end_tokens(model)
        record = Record(0, ends)
        torch.manual_seed(self.seed)
        with (
            sampled(model, Sampling(count, self.seed + 1, self.run.draw_layers)) as networks,
            averaging(model, 1, record.observe),
        ):
            given = {
                name: value.repeat(networks, 1)
                for name, value in padded(encode_prompts(tokenizer, prompts), model.device).items()
            }
            ids = model.generate(**given, **writing.arguments(tokenizer), streamer=record, use_cache=True)
        written = ids[:, given["input_ids"].shape[1] :].tolist()
        found = record.generations([End.find(row, ends, (), tokenizer) for row in written])
        return [list(found[row :: len(prompts)]) for row in range(len(prompts))]

    def called_true(self, questions: Sequence[FreeQuestion], answers: Sequence[str]) -> list[float]:
        """Log-probability of the word True after each question with its answer."""
        asked = [
            f"Question: {question.text}\n Possible answer:{answer}\n "
            "Is the possible answer:\n (A) True\n (B) False\n The possible answer is:"
            for question, answer in zip(questions, answers, strict=True)
        ]
        return in_batches(asked, self.rows, self._log_true)

    @torch.no_grad()
    def _log_true(self, texts: Sequence[str]) -> list[float]:
        tokenizer = self.run.loaded.tokenizer
        word = tokenizer(" True", add_special_tokens=False).input_ids[0]
        given = padded(encode_prompts(tokenizer, texts), self.run.model.device)
        places = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        with sampled(self.run.model, MEAN):
            logits = self.run.model(**given, position_ids=places, logits_to_keep=1).logits
        found: list[float] = logits[:, -1].float().log_softmax(-1)[:, word].tolist()
        return found


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """A batch padded on the left."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + [*row] for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def end_tokens(model: PeftModel) -> set[int]:
    """Tokens that end an answer."""
    given = model.generation_config.eos_token_id
    return set(given if isinstance(given, (list, tuple)) else [] if given is None else [given])


def logs(generation: Generation) -> tuple[float, ...]:
    """Log-probabilities of the tokens of a text."""
    return tuple(np.log(np.maximum(generation.probabilities, LEAST)).round(6).tolist())


def answered(
    question: FreeQuestion, generation: Generation, samples: Sequence[Generation], log_true: float
) -> Answered:
    """All that the scores need."""
    text = generation.text.strip()
    return Answered(
        question.id,
        Sample(text, logs(generation)),
        exact_match(text, question.answers),
        answer_f1(text, question.answers),
        tuple(np.round(generation.entropy, 6).tolist()),
        tuple(tuple(round(value, 6) for _, value in best) for best in generation.top),
        tuple(Sample(it.text.strip(), logs(it)) for it in samples),
        log_true,
    )


def our_record(question: FreeQuestion, answer: WrittenAnswer) -> dict[str, Any]:
    """Our confidence in an answer before calibration, and what the calibrated one is computed from."""
    judged = {"right": exact_match(answer.text, question.answers), "f1": answer_f1(answer.text, question.answers)}
    confidence = float(np.exp(min(0.0, answer.log_probability)))
    return {"id": question.id, "answer": answer.text, "confidence": confidence, **judged, **answer.features}


def generate_split(
    model: Generating, questions: Sequence[FreeQuestion], draws: Sequence[int], samples: int, clock: Clock
) -> dict[str, Any]:
    """Answers to some questions, ours for every number of draws."""
    prompts = [ask_freely(question, model.run.loaded.tokenizer) for question in questions]
    one_network = list(draws) == [0]
    ours, written = {}, {}
    for count in draws:
        with clock(f"answers {count}"):
            written[count] = model.answers(prompts, count)
        with clock(f"agreement {count}"):
            judged = model.assess(prompts, written[count], count)
        ours[str(count)] = [our_record(*pair) for pair in zip(questions, judged, strict=True)]
    scored = written[0 if one_network else samples]
    with clock("samples"):
        drawn = model.samples(prompts, samples, one_network=one_network)
    with clock("asking"):
        true = model.called_true(questions, [generation.text.strip() for generation in scored])
    rows = map(answered, questions, scored, drawn, true)
    return {"ours": ours, "answered": [row.to_dict() for row in rows]}


def generate_all(given: argparse.Namespace) -> None:
    """Answer both splits and write what the scores need."""
    run = load_run(given.run, raw=True, device=given.device)
    task = run.find_task(given.task)
    if not isinstance(task, AnswerTask):
        raise InputError(f"{given.run}: its task has no free answers; give the run of one that has, or --task")
    one_network = Sampling(given.samples).count(find_any_holder(run.model)) == 0
    draws = [0] if one_network else given.draws or [given.samples]
    if not one_network and given.samples not in draws:
        raise InputError(f"draws are {draws}, without {given.samples}; add it, so that rivals score the same answers")
    model = Generating(run, given.rows, given.max_new_tokens, given.seed)
    questions = {split: list(task.load(split))[: given.questions] for split in SPLITS}
    generate_split(model, questions["validation"][:4], draws, given.samples, Clock())  # warm-up
    record: dict[str, Any] = {
        "schema": 1,
        "kind": "answers",
        "model": public_name(run.config.model),
        "method": run.config.method,
        "task": public_name(run.config.task),
        "draws": draws,
        **{name: getattr(given, name) for name in ("samples", "seed", "rows", "max_new_tokens")},
        "training_seed": run.config.seed,
        "environment": describe_environment(run.model.device),
        "splits": {},
        "seconds": {},
    }
    for split, some in questions.items():
        clock = Clock()
        record["splits"][split] = generate_split(model, some, draws, given.samples, clock)
        record["seconds"][split] = {stage: spent / len(some) for stage, spent in clock.seconds.items()}
        print(f"{split}: {len(some)} questions, {sum(clock.seconds.values()):.1f} s")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
