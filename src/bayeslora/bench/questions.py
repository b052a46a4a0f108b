"""Throughput on multiple-choice questions, compared with lm-evaluation-harness on PEFT's LoRA."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bayeslora.adapter.sampling import Sampling
from bayeslora.bench.config import LORA
from bayeslora.bench.rows import Row
from bayeslora.bench.subjects import Subjects
from bayeslora.bench.timing import time_in_turns
from bayeslora.errors import InputError
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.predict.questions.scores import score_questions
from bayeslora.progress import Reporter

HARNESS = f"lm-eval, {LORA}"
OPTIONS = 4
BATCH_TOKENS = 16384
"""Tokens per batch, for the harness as well."""


@dataclass(frozen=True)
class Question:
    """A question and its options, as random tokens."""

    prompt_ids: list[int]
    option_ids: list[list[int]]


def random_questions(count: int, vocabulary: int) -> list[Question]:
    """Draw questions as long as those of ARC-Easy: prompts of about 30 tokens, some much longer, options of about 5."""
    rng = random.Random(0)

    def tokens(typical: float, spread: float) -> list[int]:
        length = max(1, round(rng.lognormvariate(0.0, spread) * typical))
        return [rng.randrange(vocabulary) for _ in range(length)]

    return [Question(tokens(28, 0.45), [tokens(4, 0.6) for _ in range(OPTIONS)]) for _ in range(count)]


def measure_questions(subjects: Subjects, report: Reporter) -> Iterator[Row]:
    """Questions per second: the harness on PEFT's LoRA, and ours with one pass and with draws, drawing included."""
    config = subjects.config
    questions = random_questions(config.questions, subjects.vocabulary)
    stock = subjects.make(LORA).eval()
    actions = {
        HARNESS: harness(stock, subjects, questions),
        "lora, one pass": ours(subjects.make("lora"), questions, 0),
    }
    for name in config.methods:
        model = subjects.make(name)
        actions |= {f"{name}, N={samples}": ours(model, questions, samples) for samples in config.samples}
    what = f"{config.questions} questions"
    report.say(what)
    timings = time_in_turns(actions, subjects.device, repeats=config.repeats, warmup=config.warmup)
    for who, timing in timings.items():
        figures = {"median": timing.median, "questions/s": config.questions / timing.median}
        yield Row(what, who, figures, timing.ratio_to(timings[HARNESS]))


def ours(model: Any, questions: Sequence[Question], samples: int) -> Callable[[], object]:
    """Score questions as runs do."""
    scorer = Scorer(model.eval())
    return lambda: score_questions(scorer, questions, Sampling(samples), batch_tokens=BATCH_TOKENS)


def harness(model: Any, subjects: Subjects, questions: Sequence[Question]) -> Callable[[], object]:
    """Log-likelihoods of all options, one request each, with as many tokens per batch as ours."""
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise InputError(
            "lm-evaluation-harness, which is to be measured, is not installed; pip install 'lm-eval<0.5'"
        ) from error
    if model.config.tie_word_embeddings and "lm_head" in subjects.config.targets:
        raise InputError(
            "lm-evaluation-harness ties the weights of this model again, which fails with an adapter on its output head; "
            "leave lm_head out, as in --targets q_proj k_proj"
        )
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    requests = [(None, one.prompt_ids, option) for one in questions for option in one.option_ids]
    longest = max(len(context) + len(option) for _, context, option in requests)
    lm = HFLM(pretrained=model, tokenizer=_tokenizer(subjects.vocabulary), batch_size=max(1, BATCH_TOKENS // longest))
    return lambda: lm._loglikelihood_tokens(requests, disable_tqdm=True)


def _tokenizer(vocabulary: int) -> Any:
    """A dummy tokenizer: the harness requires one, although it receives tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {str(token): token for token in range(vocabulary)}
    made = Tokenizer(WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="0", pad_token="0")
