"""What the values of every ablation mean, which runs they share, and which values are refused. Nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bayeslora.errors import InputError
from bayeslora.posterior import InducingConfig, InducingPosterior, LayerShape
from bayeslora.runs.saved_config import flatten, to_dict
from bayeslora.studies.ablation import AblationStudy
from bayeslora.studies.ablation_plan import make_variants, plan_jobs
from bayeslora.studies.ablations import ABLATIONS, DEGENERATE, find_ablation
from bayeslora.train import AdapterConfig, TrainingConfig

BASE = "bayesian-lora"


def study(**changes: Any) -> AblationStudy:
    return AblationStudy(**({"model": "m", "task": "arc-easy"} | changes))


def jobs(name: str, *values: str, seeds: tuple[int, ...] = (0,), **changes: Any) -> Any:
    """Runs of an ablation by label and seed."""
    ablation = find_ablation(name)
    variants = make_variants(ablation, values or ablation.values)
    return plan_jobs(study(**changes), variants, seeds, Path("runs"))


def leaves(config: Any) -> dict[str, Any]:
    """Everything a run is set to, by name, settings of the posterior included."""
    flat = flatten(to_dict(config))
    return flat | flat.pop("settings")


def changed(config: Any) -> dict[str, Any]:
    """What differs from Bayesian-LoRA as the library has it."""
    base = leaves(jobs("map-recovery")[BASE, 0].config)
    own = leaves(config)
    return {name: own.get(name) for name in {*base, *own} if own.get(name) != base.get(name)}


def label(name: str, value: str) -> str:
    """Of the row of a value; the last one if there are several methods."""
    return next(it.label for it in reversed(make_variants(find_ablation(name), (value,))))


EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("flow-depth", "0", {"flow_depth": 0}),
        ("flow-depth", "1", {}),
        ("flow-depth", "4", {"flow_depth": 4}),
        ("inducing-size", "9", {"inducing_rows": 9, "inducing_cols": 9}),
        ("rank", "8", {}),
        ("rank", "32", {"rank": 32, "alpha": 64.0}),
        ("placement", "A", {"targets": ["q_proj", "v_proj"]}),
        ("placement", "B", {"targets": ["q_proj", "k_proj", "lm_head"]}),
        ("placement", "C", {}),
        ("placement", "D", {"targets": ["gate_proj", "up_proj", "down_proj"]}),
        ("placement", "E", {"targets": EVERYTHING}),
        ("shape", "4x16", {"inducing_rows": 4, "inducing_cols": 16}),
        ("samples", "7", {}),
        ("posterior-scale", "2", {}),
        ("seeds", BASE, {}),
        ("map-recovery", "degenerate", dict(DEGENERATE)),
        ("label-smoothing", "0.1", {"label_smoothing": 0.1}),
        ("share-inducing", "separate", {}),
        ("share-inducing", "shared", {"share_inducing": True}),
        ("preset", "inducing", {}),
    ],
)
def test_a_value_changes_what_it_says_and_nothing_else(name: str, value: str, expected: dict[str, Any]) -> None:
    assert changed(jobs(name, value)[label(name, value), 0].config) == expected


def test_the_paper_preset_is_the_published_one() -> None:
    differing = changed(jobs("preset", "paper")["paper", 0].config)
    published = {"preset": "paper", "epochs": 10, "batch_size": 8, "label_smoothing": 0.1, "kl_scaling": "paper"}
    published |= {"prior_sd": 0.1, "sqrt_width_scaling": True, "init_sd_u": 1e-3, "inducing_rows": 9}
    assert published.items() <= differing.items()


@pytest.mark.parametrize("name", ABLATIONS)
def test_all_default_values_can_be_run(name: str) -> None:
    planned = jobs(name, seeds=(0, 1))
    assert {seed for _, seed in planned} == {0, 1}
    assert all(job.config.seed == seed for (_, seed), job in planned.items())


def test_values_are_those_that_were_asked_for() -> None:
    assert find_ablation("flow-depth").values == ("0", "1", "2", "4")
    assert find_ablation("samples").values == tuple(map(str, range(1, 11)))
    assert find_ablation("placement").values == tuple("ABCDE")
    assert find_ablation("seeds").seeds == tuple(range(10))
    rows_and_columns = [tuple(map(int, value.split("x"))) for value in find_ablation("shape").values]
    assert all(rows * columns == 64 for rows, columns in rows_and_columns)
    assert sum(rows != columns for rows, columns in rows_and_columns) == 4


def test_label_smoothing_varies_both_methods() -> None:
    planned = jobs("label-smoothing", "0", "0.2")
    assert list(planned) == [("lora, 0", 0), ("lora, 0.2", 0), (f"{BASE}, 0", 0), (f"{BASE}, 0.2", 0)]
    methods = [(job.config.method, job.config.training.label_smoothing) for job in planned.values()]
    assert methods == [("lora", 0.0), ("lora", 0.2), (BASE, 0.0), (BASE, 0.2)]


def test_settings_given_by_the_user_hold_for_all_values_but_not_for_lora() -> None:
    planned = jobs("map-recovery", adapter=AdapterConfig(rank=4, settings={"flow_hidden": 5}))
    hidden = {name: job.config.adapter.settings.get("flow_hidden") for (name, _), job in planned.items()}
    assert hidden == {"lora": None, label("map-recovery", "degenerate"): 5, BASE: 5}
    assert {job.config.adapter.rank for job in planned.values()} == {4}


def test_rank_keeps_the_scale_of_the_update() -> None:
    for job in jobs("rank", adapter=AdapterConfig(rank=4, alpha=12.0)).values():
        assert job.config.adapter.alpha / job.config.adapter.rank == 3.0


# What is shared -------------------------------------------------------------------------------------------------------


def test_runs_that_ablations_have_in_common_lie_in_the_same_place() -> None:
    defaults = {"flow-depth": "1", "rank": "8", "placement": "C", "samples": "3", "posterior-scale": "2", "seeds": BASE}
    defaults |= {"map-recovery": BASE, "label-smoothing": "0", "share-inducing": "separate", "preset": "inducing"}
    for name, value in defaults.items():
        assert jobs(name, value)[label(name, value), 0].path == Path("runs") / BASE / "seed-0", name
    loras = [jobs("seeds")["lora", 0], jobs("map-recovery")["lora", 0], jobs("label-smoothing", "0")["lora, 0", 0]]
    assert {job.path for job in loras} == {Path("runs/lora/seed-0")}


def test_all_other_runs_have_places_of_their_own() -> None:
    planned = {name: jobs(name) for name in ABLATIONS}
    places: dict[Path, Any] = {}
    for of_one in planned.values():
        for job in of_one.values():
            assert places.setdefault(job.path, job.config) == job.config
    # 2 as they are, depths, sizes, ranks, placements, shapes, degenerate, smoothings, shared, paper
    assert len(places) == 2 + 3 + 6 + 4 + 4 + 5 + 1 + 6 + 1 + 1


@pytest.mark.parametrize("name", ["samples", "posterior-scale"])
def test_what_is_only_evaluated_otherwise_is_trained_once_per_seed(name: str) -> None:
    planned = jobs(name, seeds=(0, 1))
    assert len(planned) == 2 * len(find_ablation(name).values)
    assert len({job.path for job in planned.values()}) == 2


# Degenerate -----------------------------------------------------------------------------------------------------------


def test_degenerate_settings_leave_hardly_any_distribution_however_long_they_are_trained() -> None:
    """With all parameters pushed to where scales are largest, draws of the factors are still all alike."""
    posterior = InducingPosterior([LayerShape("x", 12, 10, 4)], InducingConfig(**DEGENERATE))
    learnt = dict(posterior.named_parameters())
    assert not any(name.startswith(("flow", "lambda")) for name in learnt)
    with torch.no_grad():
        learnt["sd_logit_4x4"].fill_(50.0)
        spread = float(posterior.draw(4000, generator=torch.Generator().manual_seed(0)).A[0].std(dim=1).max())
        usual = InducingPosterior([LayerShape("x", 12, 10, 4)], InducingConfig(init_sd_u=0.1))
        wide = float(usual.draw(4000, generator=torch.Generator().manual_seed(0)).A[0].std(dim=1).max())
    bound = (2e-3**2 + 1e-4**2) ** 0.5  # projectors have norms of at most 1
    assert 1e-4 < spread < 1.1 * bound < 0.1 * wide


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value, advice",
    [
        ("flow-depth", "two", r"values has 'two'; flow-depth takes whole numbers from 0, such as 0 1 2 4"),
        ("flow-depth", "-1", "flow_depth must be 0"),
        ("inducing-size", "0", "inducing_rows must be at least 1"),
        ("rank", "0", "rank takes whole numbers from 1"),
        ("placement", "F", "placement takes letters, such as A B C D E"),
        ("shape", "8", "shape takes rows x columns, such as"),
        ("shape", "4x4x4", "shape takes rows x columns"),
        ("samples", "-1", "samples takes whole numbers from 0"),
        ("samples", "1.5", "samples takes whole numbers from 0"),
        ("samples", "1025", "samples takes whole numbers from 0 to 1024"),
        ("seeds", "lore", "seeds takes methods, such as lora bayesian-lora"),
        ("map-recovery", "map", "map-recovery takes names, such as lora degenerate bayesian-lora"),
        ("label-smoothing", "1", "label-smoothing takes shares"),
        ("label-smoothing", "nan", "label-smoothing takes shares"),
        ("posterior-scale", "0", "posterior-scale takes positive numbers"),
        ("posterior-scale", "inf", "posterior-scale takes positive numbers"),
        ("share-inducing", "yes", "share-inducing takes names, such as separate shared"),
        ("preset", "papers", "preset takes names, such as inducing paper"),
    ],
)
def test_values_that_make_no_sense_are_refused(name: str, value: str, advice: str) -> None:
    with pytest.raises(InputError, match=advice):
        jobs(name, value)


def test_an_unknown_ablation_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"unknown ablation 'flow_depth' \(did you mean 'flow-depth'\?\); choose flow.*, preset, or all$",
    ):
        find_ablation("flow_depth")


@pytest.mark.parametrize(
    "changes, advice",
    [
        ({"values": ("1", "1")}, "values names one twice"),
        ({"seeds": (0, 0)}, "seeds names one twice"),
        ({"shift": ("arc-easy",)}, "the task that is learnt"),
        ({"shift": ("a/x.jsonl", "b/x.jsonl")}, "two tasks have the same name"),
    ],
)
def test_studies_that_make_no_sense_are_refused(changes: dict[str, Any], advice: str) -> None:
    with pytest.raises(InputError, match=advice):
        study(**changes)


def test_training_settings_hold_for_all_values() -> None:
    planned = jobs("preset", training=TrainingConfig(epochs=2))
    assert {job.config.training.epochs for job in planned.values()} == {2}
