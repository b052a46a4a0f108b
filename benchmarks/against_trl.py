"""Training on texts beside TRL: tokens per second, peak memory and loss of ``SFTTrainer`` with PEFT's LoRA, and of ours.

python benchmarks/against_trl.py --model qwen2.5-1.5b --batches 8x512 --out against-trl.json
python benchmarks/against_trl.py --model MODEL --text data/wikitext2/train.txt --batches 16x512 --ragged --out against-trl.json

Every contestant trains in a process of its own, one after another and in turn, on the same texts:

trl            TRL's SFTTrainer with PEFT's LoRA
trl-by-length  the same, with batches of texts of similar length (``group_by_length``)
trl-bayeslora  our SFTTrainer (``BayesLoraSFTTrainer``) with Bayesian-LoRA, four components
lora           the loop of ``bayeslora train`` with LoRA
bayesian-lora  the same with Bayesian-LoRA

The model is a shape with random weights (see ``bayeslora bench``) or a directory. Without a text, tokens are drawn at random,
frequent ones more often. Tokens are counted without padding. Time runs from the end of the warm-up steps to the end of the last.
With ``--ragged`` each trainer makes up its own batches: TRL at random, our loop of texts of similar length, as it always does.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from records import command
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback

from bayeslora import BayesLoraConfig
from bayeslora.bench.shapes import SHAPES, build_model
from bayeslora.errors import InputError
from bayeslora.methods import find_method, find_preset
from bayeslora.models.device import resolve_device, resolve_dtype
from bayeslora.runs.config import RunConfig, TrainingConfig, resolve
from bayeslora.runs.environment import describe_environment
from bayeslora.tasks import EncodedText
from bayeslora.train.fit import Fit
from bayeslora.train.head_loss import find_sliceable_head
from bayeslora.train.objective import TokenObjective

CONTESTANTS = ("trl", "trl-by-length", "trl-bayeslora", "lora", "bayesian-lora")
RATE = 2e-4


@dataclass(frozen=True)
class Plan:
    """What all contestants do."""

    model: str
    text: str | None
    rows: int
    length: int
    ragged: bool
    steps: int
    warmup: int
    targets: tuple[str, ...]
    rank: int
    checkpointing: bool
    device: str

    @property
    def texts(self) -> int:
        """Texts in all, each of which is seen once."""
        return self.rows * (self.warmup + self.steps)


def load(plan: Plan) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    device = resolve_device(plan.device)
    dtype = resolve_dtype("auto", device)
    if plan.model in SHAPES:
        model = build_model(plan.model, device, dtype)
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel

        words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
        return model, PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    return AutoModelForCausalLM.from_pretrained(plan.model, dtype=dtype).to(device), tokenizer


def make_texts(plan: Plan, tokenizer: Any, vocabulary: int) -> list[list[int]]:
    """Token ids of all texts, the same for every contestant."""
    source = random.Random(0)
    lengths = [source.randint(plan.length // 8, plan.length) if plan.ragged else plan.length for _ in range(plan.texts)]
    if plan.text is None:
        words = [min(vocabulary - 1, 2 + int(source.paretovariate(0.7))) for _ in range(sum(lengths))]
    else:
        words = tokenizer(Path(plan.text).read_text(encoding="utf-8")[: 12 * sum(lengths)])["input_ids"]
    if len(words) < sum(lengths):
        raise InputError(f"{plan.text} has {len(words)} tokens, and {sum(lengths)} are wanted; take fewer steps")
    taken = iter(words)
    return [[next(taken) for _ in range(length)] for length in lengths]


@dataclass
class Watch:
    """Notes the loss of every step, the tokens of every batch, and the time from the end of the warm-up on."""

    plan: Plan
    losses: list[float] = field(default_factory=list)
    seen: list[torch.Tensor] = field(default_factory=list)
    begun: float = 0.0
    ended: float = 0.0

    def count(self, model: Any, pad_id: int) -> None:
        """Count the tokens that the model learns from, without waiting for the device."""

        def add(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                self.seen.append((args[0] != pad_id).sum())

        model.get_input_embeddings().register_forward_pre_hook(add)

    def note(self, loss: float) -> None:
        """A step has ended, and so has all that it had the device do."""
        self.losses.append(loss)
        if len(self.losses) == 1 and torch.cuda.is_available():  # before graphs are captured: their memory counts
            torch.cuda.reset_peak_memory_stats()
        if len(self.losses) == self.plan.warmup:
            self.begun = time.perf_counter()
        self.ended = time.perf_counter()


def with_trl(plan: Plan, model: Any, tokenizer: Any, texts: Sequence[Sequence[int]], name: str, watch: Watch) -> None:
    """Train with TRL's trainer, or with ours on top of it."""
    ours = name == "trl-bayeslora"
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from bayeslora.train.sft import BayesLoraSFTTrainer

    class Note(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                watch.note(logs.get("nll", logs["loss"]))

    common: dict[str, Any] = {"r": plan.rank, "lora_alpha": 2 * plan.rank, "target_modules": list(plan.targets)}
    preset = find_preset(find_method("bayesian-lora"), "default")
    own = "" if preset.posterior is None else preset.posterior.name
    config: Any = (
        BayesLoraConfig(**common, posterior=own or "decoupled", settings=dict(preset.settings), task_type="CAUSAL_LM")
        if ours
        else LoraConfig(**common, task_type="CAUSAL_LM")
    )
    with TemporaryDirectory() as place:
        arguments = SFTConfig(
            place,
            per_device_train_batch_size=plan.rows,
            max_steps=len(texts) // plan.rows,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            max_length=plan.length,
            gradient_checkpointing=plan.checkpointing,
            bf16=next(model.parameters()).dtype == torch.bfloat16,
            use_cpu=model.device.type == "cpu",
            disable_tqdm=True,
            train_sampling_strategy="group_by_length" if name == "trl-by-length" else "sequential",
        )
        trainer = (BayesLoraSFTTrainer if ours else SFTTrainer)(
            model,
            arguments,
            train_dataset=Dataset.from_dict({"input_ids": [list(text) for text in texts]}),
            processing_class=tokenizer,
            peft_config=config,
        )
        trainer.add_callback(Note())
        trainer.train()


class InOrder(Fit[EncodedText]):
    """The training loop on texts in the order given."""

    def _order_of(self, epoch: int) -> Sequence[int]:
        return range(len(self.examples))


def with_our_loop(
    plan: Plan, model: Any, tokenizer: Any, texts: Sequence[Sequence[int]], method: str, watch: Watch
) -> None:
    """Train as ``bayeslora train`` does."""
    from peft import get_peft_model

    run = resolve(RunConfig(method=method, task="", model=""))
    adapted: Any = get_peft_model(
        model,
        BayesLoraConfig(
            r=plan.rank,
            lora_alpha=2 * plan.rank,
            target_modules=list(plan.targets),
            posterior=str(run.adapter.posterior),
            settings=dict(run.adapter.settings),
            task_type="CAUSAL_LM",
        ),
    )
    if plan.checkpointing:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
    chosen: dict[str, Any] = vars(run.training) | {"epochs": 1, "batch_size": plan.rows, "learning_rate": RATE}
    chosen |= {"schedule": "constant", "warmup": 0.0, "patience": 0, "aim": 0, "weight_decay": 0.0}
    chosen["gradient_checkpointing"] = plan.checkpointing

    class Counting(TokenObjective):
        """Counts as above; where a step is replayed as a graph, the model is not called."""

        def losses(self, examples: Sequence[EncodedText], draws: int) -> torch.Tensor:
            watch.seen.append(torch.tensor(sum(map(len, examples))))
            return super().losses(examples, draws)

    lessons = [EncodedText(str(k), list(text[:1]), list(text[1:])) for k, text in enumerate(texts)]
    objective = Counting(adapted, tokenizer.pad_token_id, head=find_sliceable_head(adapted))
    (Fit if plan.ragged else InOrder)(
        objective,
        lessons,
        TrainingConfig(**chosen),
        0,
        lambda: {"nll": 0.0},
        log=lambda figures, step: watch.note(figures["train/nll"]) if "train/nll" in figures else None,
    )()


def contest(plan: Plan, name: str) -> dict[str, Any]:
    """Train one contestant in this process."""
    model, tokenizer = load(plan)
    texts = make_texts(plan, tokenizer, model.config.vocab_size)
    watch = Watch(plan)
    if name.startswith("trl"):
        watch.count(model, tokenizer.pad_token_id)
        with_trl(plan, model, tokenizer, texts, name, watch)
    else:
        with_our_loop(plan, model, tokenizer, texts, name, watch)
    seconds = watch.ended - watch.begun
    tokens = int(torch.stack(watch.seen[-plan.steps :]).sum())  # a step reads its batch at once
    return {
        "contestant": name,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "losses": [round(loss, 5) for loss in watch.losses],
    }


def apart(given: argparse.Namespace, batch: str, name: str) -> dict[str, Any]:
    """Train one contestant in a process of its own."""
    with TemporaryDirectory() as place:
        out = Path(place) / "found.json"
        words = [*given.words, "--batches", batch, "--only", name, "--out", str(out)]
        done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError(f"{name} with {batch} failed: {' '.join(done.stderr.strip().splitlines()[-3:])}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def plans(given: argparse.Namespace) -> Iterator[tuple[str, Plan]]:
    """A plan for every batch."""
    for batch in given.batches:
        rows, _, length = batch.partition("x")
        if not (rows.isdigit() and length.isdigit() and int(rows) > 0 and int(length) > 1):
            raise InputError(f"batch is {batch!r}; give rows times tokens, such as 8x512")
        yield (
            batch,
            Plan(
                given.model, given.text, int(rows), int(length), given.ragged, given.steps, given.warmup,
                tuple(given.targets), given.rank, given.gradient_checkpointing, given.device,
            ),
        )  # fmt: skip


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the rounds, and ratios to TRL within each round."""
    made = []
    for batch in dict.fromkeys(run["batch"] for run in runs):
        mine = [run for run in runs if run["batch"] == batch]
        trl = {run["round"]: run for run in mine if run["contestant"] == "trl"}
        for name in dict.fromkeys(run["contestant"] for run in mine):
            own = [run for run in mine if run["contestant"] == name]
            row = {"batch": batch, "contestant": name}
            row["tokens_per_second"] = median(run["tokens_per_second"] for run in own)
            row["speed"] = median(run["tokens_per_second"] / trl[run["round"]]["tokens_per_second"] for run in own)
            if own[0]["peak_bytes"] is not None:
                row["peak_gib"] = median(run["peak_bytes"] for run in own) / 2**30
                row["memory"] = median(run["peak_bytes"] / trl[run["round"]]["peak_bytes"] for run in own)
            last = own[0]["losses"][-10:]
            row["last_losses"] = sum(last) / len(last)
            made.append(row)
    return made


def make_table(rows: Sequence[dict[str, Any]]) -> str:
    """The summary in Markdown."""
    lines = [
        "| batch | | tokens/s | TRL = 1 | peak GiB | TRL = 1 | loss, last 10 steps |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        memory = f"{row['peak_gib']:.1f} | {row['memory']:.2f}" if "memory" in row else " | "
        numbers = f"{row['tokens_per_second']:,.0f} | {row['speed']:.2f} | {memory} | {row['last_losses']:.3f}"
        lines.append(f"| {row['batch']} | {row['contestant']} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    """Let all contestants train in turn, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--text", default=None, help="file of running text; random tokens by default")
    parser.add_argument("--batches", nargs="+", default=["8x512"], help="rows times tokens")
    parser.add_argument("--ragged", action="store_true", help="texts of an eighth of the length to all of it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS)
    parser.add_argument("--only", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.only is not None:
        [(_, plan)] = plans(given)
        given.out.write_text(json.dumps(contest(plan, given.only)), encoding="utf-8")
        return
    if "trl" not in given.contestants:
        raise InputError("contestants lack trl, to which the others are compared; add it")
    list(plans(given))  # refused now
    given.words = _without(sys.argv[1:], ("--batches", "--out", "--rounds", "--contestants"))
    runs: list[dict[str, Any]] = []
    for number in range(given.rounds):
        for batch in given.batches:
            for name in given.contestants:
                runs.append({"batch": batch, "round": number, **apart(given, batch, name)})
                print(batch, name, f"{runs[-1]['tokens_per_second']:,.0f} tokens/s", flush=True)
                record = {
                    "command": sys.argv,
                    "environment": describe_environment(resolve_device(given.device)),
                    "runs": runs,
                }
                given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    rows = summary(runs)
    given.out.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(make_table(rows))


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """The words of a command less some options with their values."""
    kept: list[str] = []
    leaving = False
    for word in words:
        if word.startswith("--"):
            leaving = word in options
        if not leaving:
            kept.append(word)
    return kept


if __name__ == "__main__":
    command(main)
