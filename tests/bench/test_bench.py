"""The benchmarks: what they time is what it is called, and the structural facts behind the speed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bayeslora import find_holder
from bayeslora.bench.actions import TrainStep, count_operators, saved_bytes
from bayeslora.bench.config import LORA, BenchConfig, parse_batch
from bayeslora.bench.growth import AXES, exponent, growth_of
from bayeslora.bench.measures import MEASURES
from bayeslora.bench.questions import harness, ours, random_questions
from bayeslora.bench.rows import Row
from bayeslora.bench.run import bench
from bayeslora.bench.shapes import SHAPES, build_model, quantise, twin
from bayeslora.bench.subjects import Subjects, trainable
from bayeslora.bench.tables import by_method
from bayeslora.bench.timing import Timing, time_in_turns
from bayeslora.errors import InputError
from bayeslora.progress import Reporter
from tiers import some
from train.tiny import bayeslora

CPU = torch.device("cpu")
SMALL = {"batches": ("2x8",), "repeats": 2, "warmup": 0, "new_tokens": 2, "samples": (1, 2), "questions": 3}


def subjects(**settings: object) -> Subjects:
    return Subjects(BenchConfig(**{**SMALL, **settings}), "cpu")


def test_actions_take_turns_and_warm_up() -> None:
    seen: list[str] = []
    timings = time_in_turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, CPU, repeats=3, warmup=2)
    assert seen == ["a", "b"] * 5
    assert {name: len(timing.rounds) for name, timing in timings.items()} == {"a": 3, "b": 3}


def test_ratios_are_taken_round_by_round() -> None:
    ours, theirs = Timing((2.0, 6.0, 30.0)), Timing((1.0, 2.0, 10.0))
    assert ours.median == 6.0
    assert ours.ratio_to(theirs) == (3.0, 2.5, 3.0)
    assert Timing((30.0, 2.0, 6.0)).ratio_to(Timing((10.0, 1.0, 2.0))) == (3.0, 2.5, 3.0)  # in whatever order
    assert Timing((3.0,)).ratio_to(Timing((2.0,))) == (1.5, 1.5, 1.5)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_the_models(name: str) -> None:
    """Parameters as published, counted without memory."""
    published = {
        "smollm2": 134_515_008,
        "qwen2.5-1.5b": 1_543_714_304,
        "llama2-7b": 6_738_415_616,
        "qwen2.5-14b": 14_770_033_664,
        "qwen3-30b-a3b": 30_532_122_624,
    }
    if name in published:
        with torch.device("meta"):
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(SHAPES[name]())
        assert sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()) == published[name]
    else:
        assert len(build_model(name, CPU, torch.float32, layers=2).model.layers) == 2


def test_models_stand_side_by_side_around_the_same_weights() -> None:
    made = subjects()
    ours, stock = made.make("bayesian-lora"), made.make(LORA)
    frozen = [{id(p) for p in model.parameters() if not p.requires_grad} for model in (ours, stock)]
    assert frozen[0] == frozen[1] and len(frozen[0]) > 10
    base = build_model("tiny", CPU, torch.float32)
    assert twin(base).model is not base.model and twin(base).lm_head.weight is base.lm_head.weight


def test_a_base_in_four_bits() -> None:
    """The weights of all linear layers but the head, near enough to the old ones, and shared by the models that are timed."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the extra 'quant'")
    base, whole = (build_model("tiny", CPU, torch.float32) for _ in range(2))
    quantise(base)
    assert {
        name.rpartition(".")[2] for name, m in base.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)
    } == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    }
    ids = torch.arange(12).view(2, 6)
    near, far = (
        (base(ids).logits - model(ids).logits).norm() for model in (whole, build_model("tiny", CPU, torch.float32, 3))
    )
    assert 0 < near < 0.3 * far
    made = subjects(bits=4, targets=("q_proj", "lm_head"))
    ours, stock = made.make("bayesian-lora"), made.make(LORA)
    assert (
        type(stock.base_model.model.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    )  # PEFT's own layer for them
    frozen = [{id(p) for p in model.parameters() if not p.requires_grad} for model in (ours, stock)]
    assert frozen[0] == frozen[1]
    found = bench(["train", "predict"], BenchConfig(**SMALL, bits=4), device="cpu")
    assert len(found.record["rows"]) == 2 + 2 + 3


def test_methods_as_rows() -> None:
    rows = [
        Row("train 2x8", LORA, {"median": 0.5, "parameters": 1000.0}, (1.0, 1.0, 1.0)),
        Row("train 2x8", "blob", {"median": 0.25, "parameters": 1500.0}, (0.5, 0.4, 0.6)),
        Row("memory 2x8", "blob", {"bytes": 2.0**21}, (1.125, 1.125, 1.125)),
        Row("predict 2x8", LORA, {"median": 0.01}, (1.0, 1.0, 1.0)),
        Row("predict 2x8", "blob, N=4", {"median": 0.02}, (2.0, 1.9, 2.1)),
    ]
    assert by_method(rows).splitlines() == [
        "| method | parameters | train 2x8 | predict 2x8 | memory 2x8 | predict 2x8, N=4 |",
        "|---|---:|---:|---:|---:|---:|",
        "| peft lora | 1,000 | 500.00 ms (1.00×) | 10.00 ms (1.00×) |  |  |",
        "| blob | 1,500 | 250.00 ms (0.50×) |  | 2.0 MiB (1.12×) | 20.00 ms (2.00×) |",
    ]


def test_stock_lora_and_ours_train_the_same_numbers_of_parameters() -> None:
    made = subjects(targets=("q_proj", "v_proj"))
    assert trainable(made.make("lora")) == trainable(made.make(LORA)) > 0


def test_the_harness_and_ours_compute_the_same() -> None:
    """At the start of training PEFT's LoRA and ours are both the base model."""
    pytest.importorskip("lm_eval")
    made = subjects()
    questions = random_questions(20, made.vocabulary)
    theirs = [total for total, _ in harness(made.make(LORA).eval(), made, questions)()]
    found = ours(made.make("lora"), questions, 0)().totals[0].flatten()
    torch.testing.assert_close(found, torch.tensor(theirs, dtype=torch.float64), atol=1e-3, rtol=1e-5)


def test_an_adapter_on_a_tied_head_is_none_for_the_harness() -> None:
    pytest.importorskip("lm_eval")
    made = subjects()
    model = made.make(LORA)
    model.config.tie_word_embeddings = True
    with pytest.raises(InputError, match=r"leave lm_head out, as in --targets q_proj k_proj"):
        harness(model, made, random_questions(2, made.vocabulary))


@pytest.mark.parametrize("what", some([it for it in MEASURES if it != "growth"], lambda what: what != "questions"))
def test_everything_can_be_measured(what: str, tmp_path: Path) -> None:
    if what == "questions":
        pytest.importorskip("lm_eval")
    found = bench([what], BenchConfig(**SMALL, draw_layers=("all", "0.5")), device="cpu", out=tmp_path / "out.json")
    rows = found.record["rows"]
    assert rows and all(row["figures"] and all(value > 0 for value in row["figures"].values()) for row in rows)
    plain = {LORA, "no adapter"}
    beside = {"draw": set(), "questions": {"lm-eval", "lora"}} | dict.fromkeys(("predict", "redraw", "decode"), plain)
    assert {row["who"].partition(",")[0] for row in rows} == beside.get(what, {LORA}) | {"bayesian-lora"}
    for row in rows:
        assert what == "draw" or row["ratio"][1] <= row["ratio"][0] <= row["ratio"][2]
        assert row["who"] in found.text
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["environment"]["packages"]["torch"] and written["config"]["repeats"] == 2
    with pytest.raises(InputError, match="is there already"):
        bench([what], BenchConfig(**SMALL), out=tmp_path / "out.json")


@pytest.mark.system
def test_growth_is_measured_along_every_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayeslora.bench.growth.AXES", {axis: values[:2] for axis, values in AXES.items()})
    found = bench(["growth"], BenchConfig(**SMALL), device="cpu", figures=tmp_path / "figures")
    rows = [Row(**row) for row in found.record["rows"]]
    for axis, values in AXES.items():
        for who, figure in ((LORA, "median"), ("bayesian-lora", "median"), ("bayesian-lora", "operators")):
            points = growth_of(rows, axis, f"{who}, train", figure)
            assert [value for value, _ in points] == list(values[:2]), (axis, who)
        assert (tmp_path / "figures" / f"growth-{axis}.svg").read_text(encoding="utf-8").startswith("<?xml")
    launches = growth_of(rows, "layers", "bayesian-lora, train", "operators")
    assert exponent(launches) == 0.0  # the same number of operators whatever the number of layers
    kept = growth_of(rows, "rows", f"{LORA}, train", "bytes")
    assert 0.5 < exponent(kept) <= 1.01


def test_what_was_measured_before_an_interruption_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(subjects: Subjects, report: Reporter) -> Iterator[Row]:
        yield Row("train 2x8", "lora", {"median": 1.0})
        raise KeyboardInterrupt

    monkeypatch.setitem(MEASURES, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(["draw", "train"], BenchConfig(**SMALL), device="cpu", out=tmp_path / "bench.json")
    rows = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["rows"]
    assert {row["what"].split()[0] for row in rows} == {"draw", "train"}


def test_growth_exponents() -> None:
    assert exponent([(1, 5.0), (2, 3.0), (8, 48.0)]) == pytest.approx(2.0)
    assert exponent([(4, 3.0), (8, 3.0)]) == 0.0


def test_figures_are_of_growth_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="figures are of growth"):
        bench(["draw"], BenchConfig(**SMALL), device="cpu", figures=tmp_path)


def test_places_where_nothing_can_be_written_are_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bayeslora.bench.run.Subjects", None)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InputError, match="file: is a file, and a directory is needed there"):
        bench(["draw"], BenchConfig(**SMALL), out=file / "out.json")
    for figures in (file, file / "figures"):
        with pytest.raises(InputError, match="file: is a file, and a directory is needed there"):
            bench(["growth"], BenchConfig(**SMALL), figures=figures)
    (tmp_path / "growth-rank.svg").write_text("of yesterday")
    with pytest.raises(InputError, match=r"holds figures already \(growth-rank.svg\)"):
        bench(["growth"], BenchConfig(**SMALL), figures=tmp_path)


def test_unknown_methods_are_told_before_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayeslora.bench.subjects.build_model", None)
    with pytest.raises(InputError, match="unknown method 'blub'"):
        subjects(methods=("blob", "blub"))


def test_operators_of_a_draw_do_not_grow_with_the_layers() -> None:
    counts = []
    for depth in (2, 6):
        found = bench(["draw"], BenchConfig(**SMALL, depth=depth), device="cpu")
        counts.append([row["figures"]["operators"] for row in found.record["rows"]])
    assert counts[0] == counts[1]
    assert count_operators(lambda: torch.ones(3) + torch.ones(3).view(3, 1)) == 3


def test_a_step_has_the_kl_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = subjects(), []
    for name in (LORA, "bayesian-lora"):
        model = made.make(name).train()
        if name != LORA:
            holder = find_holder(model)
            kl = holder.kl
            monkeypatch.setattr(holder, "kl", lambda kl=kl: asked.append(1) or kl())
        TrainStep(model, made.tokens(2, 8), name != LORA)()
    assert len(asked) == 1


def test_training_keeps_no_more_than_stock_lora_but_for_the_draw() -> None:
    """Of the size of a batch nothing is kept besides what LoRA keeps; of the size of the factors, the draw."""
    made = subjects(batches=("8x64",))
    ids = made.tokens(8, 64)
    sizes = {name: saved_bytes(TrainStep(made.make(name).train(), ids, name != LORA)) for name in (LORA, "lora")}
    assert sizes["lora"] <= sizes[LORA]
    longer = made.tokens(8, 128)
    growth = {}
    for name in (LORA, "bayesian-lora"):
        step = TrainStep(made.make(name).train(), ids, name != LORA)
        short = saved_bytes(step)
        step.ids = longer
        growth[name] = saved_bytes(step) - short
    assert growth["bayesian-lora"] <= growth[LORA]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--batches", "2x8", "--repeats", "1", "--warmup", "0", "--device", "cpu", "--quiet")
    assert bayeslora("bench", "train", "memory", *words, "--out", tmp_path / "out.json") == 0
    told = capsys.readouterr().out
    assert told.startswith("| what | method | measured | ratio to PEFT LoRA |") and "| memory 2x8 |" in told
    assert "| method | " in told
    assert (tmp_path / "out.json").exists()
    for wrong, reason in (
        (("sing", *words), "cannot measure 'sing'; choose among train, predict"),
        (("train", "--batches", "8", "--device", "cpu"), "batches has '8'; give rows times tokens"),
        (("train", "--model", "llama2"), "model is 'llama2'; choose one of tiny"),
        (("train", "--batches", "8x1"), "batches has '8x1'; give rows times tokens, of which there are at least 2"),
        (("growth", "--batches"), "batches is empty; give at least one"),
        (("draw", "--methods"), "methods is empty; give at least one"),
        (("train", "--targets"), "targets is empty; give at least one"),
        (("predict", "--draw-layers"), "draw_layers is empty; give at least one"),
        (("train", "--repeats", "0"), "repeats is 0; give a whole number of at least 1"),
        (("train", "--depth", "0"), "depth is 0; give a whole number of at least 1"),
        (("train", "--inducing", "0"), "inducing is 0; give a whole number of at least 1"),
        (("train", "--targets", "nothing", *words), "tiny cannot be adapted at nothing"),
        (("train", "--methods", "monteclora", *words), "method 'monteclora' is an adapter of PEFT's own"),
        (words, "there is nothing to measure; choose among train"),
    ):
        assert bayeslora("bench", *wrong) == 2
        assert reason in capsys.readouterr().err


def test_batches() -> None:
    assert parse_batch("16x256") == (16, 256)
    for text in ("16", "0x8", "8x1", "ax8", "8x"):
        with pytest.raises(InputError, match="give rows times tokens"):
            parse_batch(text)
