"""The confidence of free answers held against the scores of uqlm and lm-polygraph, on the same generations.

python benchmarks/hidden_options.py DATA splits
bayeslora train --model MODEL --task splits --solutions 0 --calibrate none --out runs/bayesian-lora
bayeslora train --model MODEL --task splits --method lora --solutions 0 --calibrate none --out runs/lora
python benchmarks/rivals.py generate runs/bayesian-lora --draws 4 8 --samples 8 --out bayesian-lora.json
python benchmarks/rivals.py generate runs/lora --samples 8 --out lora.json
python benchmarks/rivals.py score bayesian-lora.json lora.json --out result.json --table table.md

`generate` answers the validation and test questions of the run's task and keeps all that scores are computed from. The answer
is decoded greedily, from the average of the draws where there are some. Sampled answers have temperature 1; of a distribution
over weights each comes from a draw of its own. `score` needs no model. A confidence is fitted to each score on the validation
questions in the same way (Platt scaling), and the metrics are of the test questions. With `--packages` the packages' own
functions are used where they can be imported, in place of the formulas.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from records import command
from rival_packages import find_packages
from rival_scores import LEAST, SCORES, TOP, UNSTEMMED, Answered, Sample, Score
from torch import Tensor

from bayeslora import load_run, metrics
from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.sampling import MEAN, Sampling, sampled
from bayeslora.errors import InputError
from bayeslora.predict.calibrate.confidence import fit_confidence
from bayeslora.predict.generation import Generation, Prompt, Writing, encode_prompts, generate
from bayeslora.predict.generation.confidence import FEATURES, AnswerWriter, WrittenAnswer
from bayeslora.predict.generation.results import End, Record
from bayeslora.predict.mc import averaging
from bayeslora.report.reading import checking, read_record
from bayeslora.runs.card import public_name
from bayeslora.runs.environment import describe_environment
from bayeslora.runs.free_answers import answer_metrics, calibrate_answers, with_confidence
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import AnswerTask
from bayeslora.tasks.answers import FreeQuestion, answer_f1, ask_freely, exact_match

T = TypeVar("T")
SPLITS = ("validation", "test")
FEWEST = 5
"""Right and wrong answers below which no interval is computed."""


# Generation -----------------------------------------------------------------------------------------------------------


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


# Scores ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """The answers of a model, as ``generate`` wrote them."""

    record: Mapping[str, Any]

    @property
    def method(self) -> str:
        """How the model was trained."""
        return str(self.record["method"])

    @property
    def primary(self) -> int:
        """Draws behind the answers that rivals score."""
        return 0 if self.record["draws"] == [0] else int(self.record["samples"])

    def answered(self, split: str) -> list[Answered]:
        """What rivals score."""
        return [Answered.from_dict(row) for row in self.record["splits"][split]["answered"]]

    def ours(self, split: str, draws: int) -> list[dict[str, Any]]:
        """What our confidence is computed from."""
        return list(self.record["splits"][split]["ours"][str(draws)])

    def seconds(self, *stages: str) -> float:
        """Seconds per test question."""
        return float(sum(self.record["seconds"]["test"][stage] for stage in stages))


def read_answers(path: Path) -> Answers:
    """Read what ``generate`` wrote."""
    found = Answers(read_record(path))
    with checking(path):
        for split in SPLITS:
            found.answered(split), found.ours(split, found.primary)
    return found


def bounded(values: Sequence[float]) -> NDArray[np.float64]:
    """Scores as finite numbers: those of impossible answers are infinite. One that is no number is refused."""
    scores = np.asarray(values, dtype=np.float64)
    if np.isnan(scores).any():
        raise InputError(f"a score is no number for {int(np.isnan(scores).sum())} of {len(scores)} answers")
    return np.clip(scores, -1e6, 1e6)


def two_classes(confidence: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities ``[N, 2]`` that answers are wrong and right."""
    return np.stack([1.0 - confidence, confidence], axis=1)


def ranks(probabilities: NDArray[Any], right: NDArray[Any]) -> float:
    """AUROC of the probability to be right."""
    return metrics.auroc(probabilities[:, 1], right)


def figures(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> dict[str, Any]:
    """Metrics of a calibrated confidence."""
    records = [{"right": r, "confidence": c, "f1": 0.0} for c, r in zip(confidence, right, strict=True)]
    found = answer_metrics(records)
    kept: dict[str, Any] = {name: found.get(name) for name in ("acc", "auroc", "aurc", "ece", "brier")}
    return kept


def our_rows(answers: Answers) -> list[dict[str, Any]]:
    """Our calibrated confidence for every number of draws."""
    made = []
    for draws in answers.record["draws"]:
        held, test = (answers.ours(split, draws) for split in SPLITS)
        after = with_confidence(test, calibrate_answers(held))
        right = np.array([row["right"] for row in test], dtype=bool)
        confidence = np.array([row["confidence"] for row in after])
        made.append(
            {
                "score": f"confidence, {draws} draws" if draws else "confidence, one network",
                "package": "bayeslora",
                "source": "package",
                "model": answers.method,
                "draws": draws,
                "sequences": 2 * max(1, draws),
                "seconds": answers.seconds(f"answers {draws}", f"agreement {draws}"),
                **figures(confidence, right),
                "raw_ece": metrics.ece_from_confidence([row["confidence"] for row in test], right),
                "note": f"{len(FEATURES)} features, logistic regression",
                "confidences": confidence.round(6).tolist(),
            }
        )
    return made


Scored = dict[str, NDArray[np.float64]]
"""Values of a score for the answers of each split."""


def rival_rows(answers: Answers, packages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All scores of the packages, and those of each package together."""
    given = {split: answers.answered(split) for split in SPLITS}
    found: dict[str, Scored] = {}
    made = []
    for score in SCORES:
        use = packages.get(score.key)
        begun = time.perf_counter()
        found[score.key] = {
            split: bounded(use(rows) if use else [score.score(row) for row in rows]) for split, rows in given.items()
        }
        own = (time.perf_counter() - begun) / sum(map(len, given.values()))
        note = "" if use and score.note == UNSTEMMED else score.note  # the package does stem them
        source = packages["versions"][score.package] if use else "formula"
        row = {"score": score.name, "package": score.package, "source": source, "note": note}
        made.append(row | cost(answers, [score], own) | judged(given, [found[score.key]], score.probability))
    for package in dict.fromkeys(score.package for score in SCORES):
        mine = [score for score in SCORES if score.package == package]
        row = {"score": "all of these, weighted", "package": package, "source": "our logistic regression", "note": ""}
        made.append(row | cost(answers, mine, 0.0) | judged(given, [found[score.key] for score in mine], False))
    return made


def cost(answers: Answers, scores: Sequence[Score], own: float) -> dict[str, Any]:
    """Sequences and seconds per answer, with those of the generations that the scores need."""
    stages, sequences = [f"answers {answers.primary}"], max(1, answers.primary)
    if any(score.samples for score in scores):
        stages, sequences = [*stages, "samples"], sequences + int(answers.record["samples"])
    if any(score.asks for score in scores):
        stages, sequences = [*stages, "asking"], sequences + 1
    return {"model": answers.method, "sequences": sequences, "seconds": answers.seconds(*stages) + own}


def judged(given: Mapping[str, Sequence[Answered]], values: Sequence[Scored], probability: bool) -> dict[str, Any]:
    """Metrics of a score, or of several together, after a confidence was fitted on the validation answers."""
    held, test = (np.stack([it[split] for it in values], axis=1) for split in SPLITS)
    known, right = (np.array([row.right for row in given[split]], dtype=bool) for split in SPLITS)
    fitted = fit_confidence([f"score {k}" for k in range(len(values))], held, known)
    confidence = fitted.apply(test)
    made = figures(confidence, right) | {"confidences": confidence.round(6).tolist()}
    if probability:
        made["raw_ece"] = metrics.ece_from_confidence(test[:, 0].clip(0.0, 1.0), right)
    return made


def add_intervals(answers: Answers, rows: Sequence[dict[str, Any]], resamples: int) -> None:
    """The interval of every AUROC and, on the same answers, by how much ours is higher."""
    rights = {row["draws"]: rights_of(answers, row["draws"]) for row in rows if "draws" in row}
    ours = next(row for row in rows if row.get("draws") == answers.primary)
    for row in rows:
        right = rights[row.get("draws", answers.primary)]
        if resamples == 0 or min(right.sum(), len(right) - right.sum()) < FEWEST:
            continue
        own, best = (two_classes(np.array(it["confidences"])) for it in (row, ours))
        interval = metrics.bootstrap_interval(ranks, own, right, resamples=resamples)
        row |= {"auroc_low": interval.low, "auroc_high": interval.high}
        if "draws" not in row:
            gain = metrics.paired_bootstrap(ranks, best, own, right, resamples=resamples)
            row["auroc_gain"] = {"value": gain.difference, "low": gain.low, "high": gain.high, "p": gain.p_value}


def rights_of(answers: Answers, draws: int) -> NDArray[np.int64]:
    """Which test answers are right, as 0 and 1."""
    return np.array([row["right"] for row in answers.ours("test", draws)], dtype=np.int64)


def standing(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each of our rows, the rivals that are at least as good, of all and of those that cost as much."""
    rivals = [row for row in rows if row["package"] != "bayeslora"]
    made = []
    for own in (row for row in rows if row["package"] == "bayeslora"):
        better = {
            "auroc": [row for row in rivals if (row["auroc"] or 0.0) >= (own["auroc"] or 0.0)],
            "ece": [row for row in rivals if row["ece"] <= own["ece"]],
        }
        made.append(
            {
                "score": own["score"],
                "model": own["model"],
                "rivals": len(rivals),
                **{
                    f"no_worse_in_{name}": [f"{row['package']}: {row['score']} ({row['model']})" for row in found]
                    for name, found in better.items()
                },
                **{
                    f"no_worse_in_{name}_at_most_our_sequences": sum(
                        row["sequences"] <= own["sequences"] for row in found
                    )
                    for name, found in better.items()
                },
            }
        )
    return made


def score_all(given: argparse.Namespace) -> None:
    """Score the answers of all models and write the table."""
    packages = find_packages() if given.packages else {}
    rows: list[dict[str, Any]] = []
    models = []
    for path in given.answers:
        answers = read_answers(path)
        found = [*our_rows(answers), *rival_rows(answers, packages)]
        add_intervals(answers, found, given.resamples)
        rows += found
        models.append({name: value for name, value in answers.record.items() if name != "splits"})
        models[-1]["questions"] = {split: len(answers.answered(split)) for split in SPLITS}
    for row in rows:
        del row["confidences"]
    record = {
        "schema": 1,
        "calibration": "logistic regression on the validation answers, for all rows",
        "packages": packages.get("versions", {}),
        "models": models,
        "rows": rows,
        "standing": standing(rows),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    table = make_table(rows)
    print(table)
    if given.table is not None:
        given.table.write_text(table + "\n", encoding="utf-8")


def make_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All rows in Markdown, of each model the best AUROC first."""
    heads = (
        "score",
        "of",
        "answers by",
        "sequences",
        "ms per answer",
        "AUROC",
        "AURC",
        "ECE",
        "ECE raw",
        "Brier",
        "computed by",
    )
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|" + "---:|" * 7 + "---|"]
    for row in sorted(rows, key=lambda it: (it["model"], -(it["auroc"] or 0.0))):
        name = f"**{row['score']}**" if row["package"] == "bayeslora" else row["score"]
        cells = [f"{name} ({row['note']})" if row["note"] else name, row["package"], row["model"]]
        cells += [str(row["sequences"]), f"{1000 * row['seconds']:.1f}", _ranged(row)]
        cells += [_number(row.get(name)) for name in ("aurc", "ece", "raw_ece", "brier")]
        lines.append("| " + " | ".join([*cells, row["source"]]) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _ranged(row: Mapping[str, Any]) -> str:
    between = f" [{row['auroc_low']:.3f}, {row['auroc_high']:.3f}]" if "auroc_low" in row else ""
    return _number(row["auroc"]) + between


def main() -> None:
    """Generate, or score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    writing = verbs.add_parser("generate", help="answer the questions with a run")
    writing.add_argument("run", type=Path)
    writing.add_argument("--task", default=None, help="by default the one that the run was trained on")
    writing.add_argument(
        "--draws", nargs="*", type=int, default=[], help="of our confidence; by default as many as samples"
    )
    writing.add_argument("--samples", type=int, default=8, help="sampled answers that rivals compare")
    writing.add_argument("--questions", type=int, default=None, help="of each split, the first ones; all by default")
    writing.add_argument("--max-new-tokens", type=int, default=32)
    writing.add_argument("--rows", type=int, default=64, help="sequences at a time")
    writing.add_argument("--seed", type=int, default=0, help="of draws and samples")
    writing.add_argument("--device", default="auto")
    writing.add_argument("--out", type=Path, required=True)
    writing.set_defaults(act=generate_all)
    scoring = verbs.add_parser("score", help="compute all scores of answers and compare them")
    scoring.add_argument("answers", type=Path, nargs="+")
    scoring.add_argument("--packages", action="store_true", help="use the packages where they can be imported")
    scoring.add_argument("--resamples", type=int, default=1000, help="of the questions for intervals; 0 for none")
    scoring.add_argument("--out", type=Path, required=True)
    scoring.add_argument("--table", type=Path, default=None)
    scoring.set_defaults(act=score_all)
    given = parser.parse_args()
    given.act(given)


if __name__ == "__main__":
    command(main)
