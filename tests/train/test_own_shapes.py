"""Runs on data in the shapes of TRL: conversations, completions, labels, texts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from bayeslora import load_run
from bayeslora.adapter import BayesLoraConfig
from bayeslora.models import load_model
from bayeslora.runs.evaluation import evaluate
from bayeslora.tasks import find_task
from bayeslora.tasks.tokens import EncodedText
from bayeslora.train import AdapterConfig, DataConfig, PredictionConfig, TrainingConfig, resolve, train
from bayeslora.train.objective import TokenObjective
from bayeslora.train.run import adapt, open_task
from tasks.cases import write_lines
from tiers import some
from train import tiny
from train.tiny import bayeslora, contents, read_json, run_config

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a chat template."""
    place = tmp_path_factory.mktemp("chatty")
    loaded = load_model(tiny.model_directory(), device="cpu")
    loaded.tokenizer.chat_template = CHAT
    loaded.tokenizer.save_pretrained(place)
    loaded.model.save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that fails behind its 64 positions, which it has learnt."""
    place = tmp_path_factory.mktemp("short")
    tiny.make_tokenizer().save_pretrained(place)
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 300, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(place)
    return str(place)


def chat(number: int) -> dict[str, Any]:
    said = [
        ("user", f"Is {number} even?"),
        ("assistant", "no" if number % 2 else "yes"),
        ("user", "Sure?"),
        ("assistant", "yes"),
    ]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def completion(number: int) -> dict[str, Any]:
    return {"prompt": f"Is {number} even?", "completion": " no" if number % 2 else " yes"}


def labelled(number: int) -> dict[str, Any]:
    return {"text": f"the number {number}", "label": ["even", "odd"][number % 2]}


def document(number: int) -> dict[str, Any]:
    return {"text": f"{number} is {['even', 'odd'][number % 2]}."}


def write_task(place: Path, make: Any) -> str:
    start = 0
    for split, count in (("train", 12), ("validation", 10), ("test", 6)):
        write_lines(place / f"{split}.jsonl", [make(start + k) for k in range(count)])
        start += count
    return str(place)


def config(model: str, task: str, method: str = "bayesian-lora", **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "model": model,
        "task": task,
        "data": DataConfig(max_tokens=96),
        "training": TrainingConfig(epochs=2, batch_size=4, learning_rate=0.02),
        "prediction": PredictionConfig(samples=2, calibrate="none"),
    }
    return run_config(method, **(settings | changes))


@pytest.mark.parametrize(
    "make, method",
    some(
        [(make, method) for make in (chat, completion, document) for method in ("lora", "bayesian-lora")],
        [(chat, "bayesian-lora"), (document, "lora")],
    ),
)
def test_runs_learn_and_say_what_they_learnt(make: Any, method: str, chatty: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", make)
    result = train(config(chatty, task, method), tmp_path / "run")
    texts = find_task(task).encode("test", AutoTokenizer.from_pretrained(chatty), 96)
    assert result.counts["test"] == {"texts": len(texts), "tokens": sum(text.terms for text in texts)}
    history = [epoch["validation"]["nll"] for epoch in result.history]
    assert all(math.isfinite(nll) for nll in history) and history[-1] < history[0]
    again = evaluate(load_run(tmp_path / "run"), None, "test")
    assert again.metrics["nll"] == pytest.approx(result.metrics["nll"], abs=1e-6)


def test_labels_are_learnt_as_options(chatty: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", labelled)
    result = train(config(chatty, task), tmp_path / "run")
    assert result.counts["train"]["questions"] == 12 and 0 <= result.metrics["acc"] <= 1
    for scoring in ("letter",):
        data = DataConfig(max_tokens=96, scoring=scoring)
        assert train(config(chatty, task, data=data), tmp_path / scoring).metrics["nll"] > 0


def test_texts_with_some_of_the_labels_are_evaluated_with_all_of_them(chatty: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", labelled)
    train(config(chatty, task), tmp_path / "run")
    trained = load_run(tmp_path / "run")
    odd = write_lines(tmp_path / "new" / "test.jsonl", [{"text": f"the number {k}", "label": "odd"} for k in (51, 53)])
    found = trained.evaluate(str(odd.parent))
    assert found.items[0].options == (" even", " odd")
    asked = [answer.probabilities for answer in trained.classify(["the number 51", "the number 53"])]
    assert found.probabilities.tolist() == [list(it) for it in asked]


@pytest.mark.parametrize("make", some([labelled, document], [labelled]))
def test_texts_are_cut_to_the_context_of_the_model(make: Any, short: str, tmp_path: Path) -> None:
    def long(number: int) -> dict[str, Any]:
        return make(number) | {"text": f"{number} " * 90}

    task, data, adapter = write_task(tmp_path / "task", long), DataConfig(), AdapterConfig(rank=2, targets=("c_attn",))
    result = train(config(short, task, data=data, adapter=adapter), tmp_path / "run")
    assert result.metrics["nll"] > 0
    trained = load_run(tmp_path / "run")
    assert evaluate(trained, None, "test").metrics["nll"] == pytest.approx(result.metrics["nll"], abs=1e-6)
    assert len(trained.generate("Is it even?", max_new_tokens=100).token_ids) <= 64


def test_the_nll_is_that_of_the_assistants_tokens(chatty: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", chat)
    result = train(config(chatty, task, "lora"), tmp_path / "run")
    trained = load_run(tmp_path / "run")
    total = count = 0.0
    for text in find_task(task).encode("test", trained.loaded.tokenizer, 96):
        ids = torch.tensor([[*text.prompt_ids, *text.target_ids]])
        with torch.no_grad():
            logits = trained.model(input_ids=ids).logits[0, len(text.prompt_ids) - 1 : -1].log_softmax(-1)
        taken = logits[torch.arange(len(text.target_ids)), torch.tensor(text.target_ids)]
        counted = torch.tensor(text.counted)
        assert 0 < counted.sum() < len(counted)
        total -= float(taken[counted].sum())
        count += int(counted.sum())
    assert result.metrics["nll"] == pytest.approx(total / count, rel=1e-5)


def test_tokens_that_do_not_count_change_nothing() -> None:
    """What a user says between two answers is read, but has no loss."""
    model = AutoModelForCausalLM.from_pretrained(tiny.model_directory())
    objective = TokenObjective(model)
    text = EncodedText("x", [5, 6], [7, 8, 9, 10], (True, False, False, True))
    with torch.no_grad():
        [loss] = objective.losses([text], 1).tolist()
        [whole] = objective.losses([EncodedText("x", [5, 6], [7, 8, 9, 10])], 1).tolist()
        [between] = objective.losses([EncodedText("x", [5, 6, 7], [8, 9])], 1).tolist()
    assert loss == pytest.approx(whole - between, rel=1e-5) and objective.terms(text) == 2


@pytest.mark.system
def test_an_interrupted_run_goes_on_to_the_same_bits(
    chatty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write_task(tmp_path / "task", chat)
    train(config(chatty, task), tmp_path / "whole")

    class Stop(Exception):
        pass

    from bayeslora.train import fit

    own, calls = fit.Fit._step, [0]

    def step(self: Any, state: Any) -> None:
        calls[0] += 1
        if calls[0] == 5:
            raise Stop
        own(self, state)

    with monkeypatch.context() as patched:
        patched.setattr(fit.Fit, "_step", step)
        with pytest.raises(Stop):
            train(config(chatty, task), tmp_path / "parts")
    train(config(chatty, task), tmp_path / "parts")
    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    assert {name for name in whole if whole[name] != parts[name]} == {"result.json"}  # which has the time


@pytest.mark.system
def test_truncated_examples_are_counted(chatty: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", chat)
    lengths = [len(text) for text in find_task(task).encode("train", AutoTokenizer.from_pretrained(chatty), 96)]
    data = DataConfig(max_tokens=max(lengths) - 1)
    result = train(config(chatty, task, "lora", data=data), tmp_path / "run")
    assert result.counts["train"]["truncated"] == sum(length == max(lengths) for length in lengths)


def test_a_dry_run_shows_what_is_learnt(chatty: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", chatty, "--targets", "q_proj", "--tflops", 1, "--out", tmp_path / "run", "--dry-run"]
    assert bayeslora("train", "--task", write_task(tmp_path / "chats", chat), *words) == 0
    out = capsys.readouterr().out
    assert "example 3, of which [[this]] is learnt:\n<user>Is 2 even?</><assistant>[[yes</>]]<user>Sure?</>" in out
    assert bayeslora("train", "--task", write_task(tmp_path / "labels", labelled), *words) == 0
    assert "Text: the number 1\nLabel:[[ odd]]" in capsys.readouterr().out
    assert contents(tmp_path / "run") == {}


def test_columns_are_part_of_the_run(chatty: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = write_task(tmp_path / "task", lambda k: {"in": completion(k)["prompt"], "out": completion(k)["completion"]})
    words = tiny.options(tmp_path / "run", "--model", chatty, "--task", task, "--method", "lora", "--columns")
    assert bayeslora(*words, "prompt=in", "completion=out") == 0
    assert read_json(tmp_path / "run" / "config.json")["data"]["columns"] == {"prompt": "in", "completion": "out"}
    capsys.readouterr()
    assert bayeslora("evaluate", tmp_path / "run", "--quiet") == 0
    assert capsys.readouterr().out.endswith("% of the next tokens.\n")
    other = write_task(tmp_path / "other", completion)
    assert bayeslora("evaluate", tmp_path / "run", "--task", other, "--quiet") == 2
    assert "has no field 'in'" in capsys.readouterr().err
    assert bayeslora("evaluate", tmp_path / "run", "--task", other, "--columns", "--quiet") == 0


# The same through TRL -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", some([completion, chat], [chat]))
def test_trl_with_our_mixin_has_the_same_loss(make: Any, chatty: str, tmp_path: Path) -> None:
    """One batch at the same draw: the mean over its tokens plus the KL over the tokens of all examples."""
    trl = pytest.importorskip("trl")

    from bayeslora.train.trainer import BayesLoraTrainerMixin

    class BayesSFT(BayesLoraTrainerMixin, trl.SFTTrainer):
        aim = 0

    rows = [make(k) for k in range(4)]
    if make is chat:  # TRL learns from all of the assistant's turns only with a template that marks them
        rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:2]} for row in rows]
    task = write_lines(tmp_path / "task" / "train.jsonl", rows).parent
    for split in ("validation", "test"):
        write_lines(task / f"{split}.jsonl", rows)
    run = resolve(config(chatty, str(task), training=TrainingConfig(epochs=1, batch_size=4, aim=0)))
    runner = open_task(run, None)
    loaded = load_model(chatty, device="cpu")
    runner.encode(loaded)
    model = adapt(loaded, run)
    runner.bind(model, None)
    model.train()
    holder = model.base_model.holder
    terms = sum(map(runner.objective.terms, runner.examples))
    holder.seed(3)
    losses = runner.objective.losses(runner.examples, 1)
    ours = float((losses.sum() / terms + holder.kl().learnt / terms).detach())
    arguments = trl.SFTConfig(
        str(tmp_path / "out"), per_device_train_batch_size=4, report_to=[], use_cpu=True, max_length=96, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    fresh = load_model(chatty, device="cpu")
    settings = model.peft_config["default"]
    peft_config = BayesLoraConfig(**{name: getattr(settings, name) for name in (
        "posterior", "settings", "r", "lora_alpha", "target_modules", "seed")})  # fmt: skip
    trainer = BayesSFT(
        fresh.model,
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=fresh.tokenizer,
        peft_config=peft_config,
    )
    theirs_holder = trainer.model.base_model.holder
    theirs_holder.load_state_dict(holder.state_dict())
    batch = trainer._prepare_inputs(next(iter(torch.utils.data.DataLoader(
        trainer.train_dataset, batch_size=4, collate_fn=trainer.data_collator))))  # fmt: skip
    assert int((batch["labels"] != -100).sum()) == terms
    trainer.model.train()
    theirs_holder.seed(3)
    trainer.current_gradient_accumulation_steps = 1
    theirs = float(trainer.compute_loss(trainer.model, batch))
    assert theirs == pytest.approx(ours, rel=1e-4)


def test_trl_takes_the_name_of_a_model(chatty: str, tmp_path: Path) -> None:
    """It is loaded as TRL loads it, and the user's arguments stay as they are."""
    trl = pytest.importorskip("trl")

    from bayeslora.train import BayesLoraSFTTrainer

    arguments = trl.SFTConfig(
        str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False, model_init_kwargs={"dtype": "bfloat16"}
    )
    rows = Dataset.from_list([completion(k) for k in range(4)])
    wanted = BayesLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    trainer = BayesLoraSFTTrainer(chatty, arguments, train_dataset=rows, peft_config=wanted)
    assert trainer.model.peft_config["default"].posterior == "decoupled"
    assert trainer.model.base_model.model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert arguments.model_init_kwargs == {"dtype": "bfloat16"} and trainer.args.output_dir == arguments.output_dir
    assert trainer.model.peft_config["default"].base_model_name_or_path == chatty
