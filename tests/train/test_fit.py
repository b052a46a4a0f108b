"""The training loop: its gradient against an ELBO written out, and its run against itself, interrupted anywhere."""

import functools
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from adapter.cases import adapted, tokens
from bayeslora import find_holder
from bayeslora.adapter.sampling import Sampling
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.predict.questions.scores import score_questions
from bayeslora.predict.trunk import TrunkScorer
from bayeslora.runs.config import TrainingConfig
from bayeslora.train.errors import TrainingDiverged
from bayeslora.train.fit import Fit, _mix
from bayeslora.train.objective import Example, QuestionObjective
from bayeslora.train.optimise import rate_factor
from bayeslora.train.processes import Processes
from posterior.cases import NoLooking
from predict.test_options import questions
from rounding import summed
from tiers import some

COUNT, BATCH, EPOCHS = 7, 3, 2
STEPS = 6  # 3 + 3 + 1 questions, twice
UNCLIPPED = 1e9


def examples(count=COUNT, seed=0):
    """Questions of two to four options."""
    return [Example(f"q{k}", q, k % len(q.option_ids)) for k, q in enumerate(questions(seed, count))]


def settings(**changes):
    values = {
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "learning_rate": 0.01,
        "rate_multipliers": {},
        "weight_decay": 0.01,
        "schedule": "linear",
        "warmup": 0.0,
        "milestones": (4, 6),
        "label_smoothing": 0.0,
        "kl_scaling": "elbo",
        "kl_beta": 1.0,
        "kl_warmup": 0.0,
        "optimiser": "adamw",
        "cycles": 1,
        "kl_rate": 0.01,
        "draws": 1,
        "aim": 0,
        "adam_epsilon": 1e-8,
        "clip": 1.0,
        "eval_every": 1,
        "patience": 0,
    }
    return TrainingConfig(**(values | changes))


def small(posterior="inducing"):
    """A model with one adapted layer in each block, to be quick."""
    return adapted(posterior=posterior, target_modules=["q_proj"])


def validation_nll(model):
    """A real evaluation, with draws of its own."""
    held_out = examples(4, seed=9)
    scores = score_questions(Scorer(model), [e.encoded for e in held_out], Sampling(2, 1), batch_tokens=1000)
    return {"nll": -float(np.mean([scores.predictive[row, e.gold] for row, e in enumerate(held_out)]))}


def make_fit(model, *, scorer=None, validate=None, seed=0, count=COUNT, fit=None, **changes):
    """A run; without ``validate`` every evaluation comes out the same."""
    validate = validate or (lambda: {"nll": 0.0})
    config = settings(**changes)
    objective = QuestionObjective(scorer or Scorer(model), config.label_smoothing)
    return Fit(objective, examples(count), config, seed, validate, **(fit or {}))


def make_whole_fit(model, **changes):
    """A run with a real evaluation."""
    return make_fit(model, validate=functools.partial(validation_nll, model), **changes)


def parameters(model):
    return {name: p.detach().clone() for name, p in find_holder(model).named_parameters()}


def gradients(model):
    return {name: p.grad.clone() for name, p in find_holder(model).named_parameters() if p.grad is not None}


def assert_identical(got, want):
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def assert_close(got, want, atol, rtol=0.0):
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}")


class Recording(Scorer):
    """Remembers which questions it was asked to score."""

    def __init__(self, model):
        super().__init__(model)
        self.batches = []

    def __call__(self, items, draws=1, *, blocks=1):
        self.batches.append(list(items))
        return super().__call__(items, draws, blocks=blocks)

    def numbers(self):
        """The same by their number among the examples."""
        known = [example.encoded for example in examples()]
        return [[known.index(item) for item in batch] for batch in self.batches]


@dataclass
class Figures:
    """Keeps what is logged, and fails at the call asked for."""

    fail_at: int = 0
    rows: list = field(default_factory=list)

    def __call__(self, figures, step):
        self.rows.append({**figures, "step": step})
        if len(self.rows) == self.fail_at:
            raise ConnectionError("the power is gone")

    def __getitem__(self, name):
        return [row[name] for row in self.rows if name in row]


# One step -------------------------------------------------------------------------------------------------------------


def use(model, draw):
    find_holder(model).use({"default": draw})


def option_means(model, item):
    """Mean log-likelihood per token of every option, one sequence each."""
    means = []
    for option in item.option_ids:
        ids = torch.tensor([[*item.prompt_ids, *option]])
        log_p = model(input_ids=ids).logits.log_softmax(-1)[0, len(item.prompt_ids) - 1 : -1]
        means.append(log_p.gather(1, torch.tensor(option)[:, None]).mean())
    return torch.stack(means)


def elbo_gradient(model, parts, *, weight, draws=1, smoothing=0.0, seed=0):
    """Gradient of mean cross-entropy + weight · KL at the first step, one draw and one sequence at a time.

    ``parts`` are computed apart, each with draws of its own, among which its questions take turns.
    """
    posterior = find_holder(model).posterior("default")
    size = sum(map(len, parts))
    loss = torch.zeros(())
    for index, part in enumerate(parts):
        factors = posterior.draw(draws, torch.Generator().manual_seed(_mix(seed, 0, index)))
        for k in range(draws):
            use(model, factors.pick(k))
            for example in part[k::draws]:
                means, gold = option_means(model, example.encoded), torch.tensor([example.gold])
                loss = loss + F.cross_entropy(means[None], gold, label_smoothing=smoothing) / size
        loss = loss + weight * posterior.kl(factors).total / len(parts)
    loss.backward()
    return gradients(model)


ONE_STEP = {"epochs": 1, "batch_size": COUNT, "clip": UNCLIPPED}


@pytest.mark.parametrize(
    "posterior, draws",
    some(
        [(posterior, draws) for posterior in ("inducing", "point", "ensemble") for draws in (1, 2, 3)],
        [("inducing", 1), ("inducing", 3), ("point", 2), ("ensemble", 2)],
    ),
)
def test_the_gradient_of_a_step_is_that_of_the_elbo(posterior, draws):
    model = adapted(posterior=posterior)
    scorer = Recording(model)
    make_fit(model, scorer=scorer, draws=draws, **ONE_STEP)()
    (batch,) = ([examples()[number] for number in part] for part in scorer.numbers())
    want = elbo_gradient(adapted(posterior=posterior), [batch], weight=1 / COUNT, draws=draws)
    assert_close(gradients(model), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "changes, weight, smoothing",
    [
        ({"kl_beta": 0.25}, 0.25 / COUNT, 0.0),
        ({"kl_scaling": "paper"}, 0.2, 0.0),
        ({"label_smoothing": 0.2, "kl_beta": 0.0}, 0.0, 0.2),
        ({"seed": 3}, 1 / COUNT, 0.0),
    ],
)
def test_the_gradient_follows_the_settings(changes, weight, smoothing):
    model, seed = adapted(), changes.get("seed", 0)
    make_fit(model, **{**ONE_STEP, **changes})()
    want = elbo_gradient(adapted(), [examples()], weight=weight, smoothing=smoothing, seed=seed)
    assert_close(gradients(model), want, atol=1e-5, rtol=1e-4)


def test_a_batch_that_is_not_full_counts_by_its_questions():
    model = adapted()
    make_fit(model, **{**ONE_STEP, "batch_size": 2 * COUNT})()
    want = elbo_gradient(adapted(), [examples()], weight=1 / COUNT)
    assert_close(gradients(model), want, atol=1e-5, rtol=1e-4)


@pytest.mark.system
def test_dropout_is_another_in_every_process():
    """Torch's own generator is what dropout asks; a process's number decides its seed."""

    class Looking(Scorer):
        def __call__(self, *args, **kwargs):
            seeds.append(torch.initial_seed())
            return super().__call__(*args, **kwargs)

    found = []
    for rank in (0, 0, 1):
        model, seeds = small(), []
        make_fit(model, scorer=Looking(model), fit={"processes": Processes(rank)}, batch_size=1)()
        found.append(seeds[:5])
    assert found[0] == found[1] and len(set(found[0])) == 5 and not set(found[0]) & set(found[2])


def test_the_weight_of_the_kl_rises():
    figures = Figures()
    make_fit(adapted(), epochs=4, batch_size=COUNT, kl_warmup=0.5, fit={"log": figures})()
    assert figures["train/kl_weight"] == pytest.approx([0.5 / COUNT, 1 / COUNT, 1 / COUNT, 1 / COUNT])


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_parts_of_a_batch_have_draws_of_their_own_and_one_kl_together(micro_batch):
    """Unbiased: every question counts as before, and the KL is averaged over the draws of the parts."""
    model = adapted()
    scorer = Recording(model)
    make_fit(model, scorer=scorer, micro_batch=micro_batch, **ONE_STEP)()
    assert [len(part) for part in scorer.batches] == ([1] * 7 if micro_batch == 1 else [3, 3, 1])
    known = examples()
    parts = [[known[number] for number in part] for part in scorer.numbers()]
    want = elbo_gradient(adapted(), parts, weight=1 / COUNT)
    assert_close(gradients(model), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("micro_batch", some([1, 2, 7, 100], [2, 100]))
def test_a_point_takes_exactly_the_same_step_in_parts(micro_batch):
    results = []
    for size in (None, micro_batch):
        model = adapted(posterior="point")
        make_fit(model, micro_batch=size, **ONE_STEP)()
        results.append((gradients(model), parameters(model)))
    (want, moved), (got, moved_in_parts) = results
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, **summed(value), msg=lambda m, n=name: f"{n}: {m}")
    for (
        name,
        value,
    ) in moved.items():  # Adam's first step is its rate times a sign, as long as gradients are above epsilon
        torch.testing.assert_close(moved_in_parts[name], value, atol=1e-3 * settings().learning_rate, rtol=0)


def test_a_batch_of_one_question_has_one_draw():
    figures, model = Figures(), adapted()
    make_fit(adapted(), count=1, draws=2, fit={"log": figures}, epochs=1, batch_size=1)()
    draw = find_holder(model).posterior("default").draw(1, torch.Generator().manual_seed(_mix(0, 0, 0)))
    (example,) = examples(1)
    with torch.no_grad():
        use(model, draw)
        log_p = option_means(model, example.encoded).log_softmax(0)[example.gold]
    assert figures["train/nll"] == pytest.approx([float(-log_p)], abs=1e-5)


@pytest.mark.parametrize("posterior", ["inducing", "contextual"])
def test_the_kl_counts_once_whatever_the_draws(posterior):
    """Rows are divided among draws: a KL of tokens has all of them then, too."""
    model = adapted(
        posterior=posterior, settings={"flow_depth": 0} if posterior == "inducing" else {}, init_weights=True
    )
    holder, found = find_holder(model.train()), []
    for draws in (1, 2, 4):
        holder.draw(draws, torch.Generator().manual_seed(0))
        model(tokens(batch=4))
        found.append(float(holder.kl_share(1, draws) * holder.kl().total))
    assert found == pytest.approx([found[0]] * 3, rel=1e-5) and found[0] > 0


def test_with_checkpointing_aiming_looks_at_one_question_at_a_time():
    """Activations of a whole batch may not fit where checkpointing is wanted, and evaluation keeps all of them."""
    aimed = []
    for checkpointing in (False, True):
        model = adapted(init_weights=True)
        scorer = Recording(model)
        make_fit(model, scorer=scorer, aim=2, gradient_checkpointing=checkpointing)._aim()
        assert {len(batch) for batch in scorer.batches} == ({1} if checkpointing else {BATCH})
        aimed.append(parameters(model))
    for name, value in aimed[0].items():
        torch.testing.assert_close(aimed[1][name].abs(), value.abs(), rtol=1e-3, atol=1e-4)


def test_time_of_evaluations_is_not_that_of_steps():
    def slow():
        time.sleep(0.05)
        return {"nll": 0.0}

    state = make_fit(small("point"), validate=slow)()
    assert state.seconds >= state.step_seconds + EPOCHS * 0.05 and state.step_seconds > 0


@pytest.mark.parametrize("posterior", ["inducing", "point", "meanfield", "blob", "contextual", "dropout"])
def test_a_step_does_not_wait_for_the_device(posterior, monkeypatch):
    """No number is read off a tensor, so that a GPU always has the next step queued."""
    monkeypatch.setattr("bayeslora.posterior.projection.ASYNCHRONOUS", ("cpu",))
    fit = make_fit(adapted(posterior=posterior), **ONE_STEP)
    with NoLooking():
        fit._take_step(0)


@pytest.mark.parametrize("clip", [0.5, 1e-3])
def test_data_and_scales_are_clipped_apart(clip):
    model = adapted()
    make_fit(model, **{**ONE_STEP, "clip": clip})()
    kinds = find_holder(model).posterior("default").kind
    for scales in (True, False):
        clipped = [g for name, g in gradients(model).items() if (kinds(name.split(".")[-1]) == "scale") == scales]
        assert float(torch.cat([g.flatten() for g in clipped]).norm()) == pytest.approx(clip, rel=1e-3)


def test_rates_follow_the_schedule_and_the_kinds():
    model, figures = adapted(), Figures()
    before = parameters(model)
    multipliers = {"mean": 0.0, "points": 2.0, "diagonals": 2.0, "flow": 2.0, "scale": 2.0}
    fit = {"log": figures}
    make_fit(model, warmup=0.5, schedule="cosine", rate_multipliers=multipliers, fit=fit)()
    shape = {"steps": STEPS, "steps_per_epoch": 3, "warmup": 0.5, "milestones": ()}
    want = [0.02 * rate_factor("cosine", step, **shape) for step in range(STEPS)]
    assert figures["train/learning_rate"] == pytest.approx(want)
    for name, value in parameters(model).items():
        assert torch.equal(value, before[name]) == (".mean_" in name), name


def test_a_first_step_of_adam_moves_every_weight_by_its_rate():
    """Without decay AdamW's first step is the sign of the gradient: an independent check of rate and update."""
    model = adapted(posterior="point")
    before = parameters(model)
    make_fit(model, weight_decay=0.0, **ONE_STEP)()
    for name, gradient in gradients(model).items():
        moved = parameters(model)[name] - before[name]
        clear = gradient.abs() > 1e-5
        torch.testing.assert_close(moved[clear], -0.01 * gradient[clear].sign(), atol=2e-5, rtol=0)


def test_a_kept_trunk_trains_the_same():
    results = []
    for make in (Scorer, TrunkScorer):
        model = adapted(target_modules=["q_proj", "v_proj"], layers_to_transform=[1])
        make_fit(model, scorer=make(model), learning_rate=1e-3)()
        results.append((gradients(model), parameters(model)))
    (want, moved), (got, moved_too) = results
    assert_close(got, want, atol=1e-5, rtol=1e-3)
    assert_close(moved_too, moved, atol=1e-4)


# Order ----------------------------------------------------------------------------------------------------------------


@functools.cache
def order_of(seed, epochs=3):
    """Numbers of the questions in the order they were learnt from, by epoch."""
    scorer = Recording(small("point"))
    make_fit(scorer.model, scorer=scorer, seed=seed, epochs=epochs)()
    assert [len(batch) for batch in scorer.batches] == [3, 3, 1] * epochs
    numbers = [number for batch in scorer.numbers() for number in batch]
    return [numbers[start : start + COUNT] for start in range(0, len(numbers), COUNT)]


def test_every_epoch_has_all_questions_in_an_order_of_its_own():
    orders = order_of(seed=0)
    assert all(sorted(order) == list(range(COUNT)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert order_of.__wrapped__(seed=0) == orders
    assert order_of(seed=1) != orders


# Interruption ---------------------------------------------------------------------------------------------------------


def gpt2_with_dropout():
    model = adapted("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    return model


RUNS = {
    "inducing": (small, {"patience": 1}),
    "point": (functools.partial(small, "point"), {}),
    "dropout, parts and draws": (gpt2_with_dropout, {"micro_batch": 2, "draws": 2, "schedule": "cosine"}),
}


def outcome(model, state):
    """All that a run leaves, but for the time it took."""
    rest = {name: value for name, value in vars(state).items() if name not in ("best", "seconds", "step_seconds")}
    return {**parameters(model), **{f"best {n}": v for n, v in state.best.items()}}, rest


@functools.cache
def uninterrupted(name):
    make, changes = RUNS[name]
    model = make()
    return outcome(model, make_whole_fit(model, **changes)())


SAVED = [0, 1, 2, 2, 3, 4, 5, 5]  # steps in the checkpoint at each call of the log: 1, 2, 3, evaluation, 4, ...


@pytest.mark.parametrize(
    "name, fail_at",
    some(
        [("inducing", k + 1) for k in range(len(SAVED))]
        + [(name, k + 1) for name in ("point", "dropout, parts and draws") for k in (1, 3, 6)],
        [("inducing", 3), ("inducing", 4), ("inducing", 7), ("point", 4), ("dropout, parts and draws", 7)],
    ),
)
def test_a_run_interrupted_anywhere_ends_as_if_nothing_had_happened(tmp_path, name, fail_at):
    """Figures are logged after every step and every evaluation; each of them is the end once."""
    make, changes = RUNS[name]
    kept = {"checkpoint": tmp_path / "c.safetensors", "checkpoint_seconds": 0, "run": name}
    with pytest.raises(ConnectionError, match="the power is gone"):
        make_whole_fit(make(), **changes, fit={**kept, "log": Figures(fail_at)})()
    torch.manual_seed(fail_at)  # neither the global state nor the new model's draws matter
    model, figures = make(), Figures()
    state = make_whole_fit(model, **changes, fit={**kept, "log": figures})()
    want, rest = uninterrupted(name)
    got, got_rest = outcome(model, state)
    assert_identical(got, want)
    assert got_rest == rest
    assert len(figures["train/nll"]) == STEPS - SAVED[fail_at - 1]


@pytest.mark.parametrize("name", ["inducing", "point"])
def test_the_same_seed_gives_the_same_run_and_another_another(name):
    make, changes = RUNS[name]
    model = make()
    torch.manual_seed(99)
    got, rest = outcome(model, make_whole_fit(model, **changes)())
    assert_identical(got, uninterrupted(name)[0])
    assert rest == uninterrupted(name)[1]
    model = make()
    other, _ = outcome(model, make_whole_fit(model, seed=1, **changes)())
    assert not any(torch.equal(other[n], value) for n, value in got.items() if ".mean_" in n or ".A_" in n)


def test_a_run_that_is_done_is_not_trained_again(tmp_path):
    kept, figures = {"checkpoint": tmp_path / "c.safetensors"}, Figures()
    model = small()
    state = make_fit(model, fit=kept)()
    fresh = small()
    again = make_fit(fresh, fit={**kept, "log": figures})()
    assert not figures.rows and again.history == state.history and again.step == STEPS
    assert_identical(parameters(fresh), parameters(model))


def saved_steps(path, checkpoint_seconds):
    """The step of the checkpoint that lies there whenever a step is logged."""
    found = []

    def look(figures, step):
        if "train/nll" in figures:
            found.append(read_state(path)["step"] if path.exists() else None)

    fit = {"log": look, "checkpoint": path, "checkpoint_seconds": checkpoint_seconds}
    make_fit(small("point"), fit=fit)()
    return found


def read_state(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["state"])


def test_checkpoints_are_written_at_the_end_of_epochs_and_when_time_is_up(tmp_path):
    assert saved_steps(tmp_path / "a", 0) == [None, 1, 2, 3, 4, 5]
    assert saved_steps(tmp_path / "b", 1e9) == [None, None, None, 3, 3, 3]


def test_time_is_counted_over_all_attempts_and_not_between_them(tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("bayeslora.train.fit.time", SimpleNamespace(monotonic=lambda: 10.0 * next(clock)))
    kept = {"checkpoint": tmp_path / "c.safetensors", "checkpoint_seconds": 0}
    with pytest.raises(ConnectionError):
        make_fit(small("point"), fit={**kept, "log": Figures(7)})()
    before = read_state(tmp_path / "c.safetensors")["seconds"]
    [next(clock) for _ in range(1000)]
    after = make_fit(small("point"), fit=kept)().seconds
    assert before > 50 and before < after < before + 50  # five steps, and then one
    assert make_fit(small("point"), fit=kept)().seconds == after


# Evaluation and early stopping ----------------------------------------------------------------------------------------


@dataclass
class Script:
    """Evaluations with a given outcome, that remember the parameters they saw."""

    model: torch.nn.Module
    nlls: list
    seen: list = field(default_factory=list)

    def __call__(self):
        self.seen.append(parameters(self.model))
        return {"nll": self.nlls[len(self.seen) - 1]}


@pytest.mark.parametrize(
    "nlls, patience, evaluations, kept, stopped",
    [
        ([1.0, 0.8, 0.9, 0.85, 0.1], 2, 4, 1, True),
        ([1.0, 1.1, 0.9, 1.0, 0.95], 2, 5, 2, True),
        ([1.0, 1.1, 1.2, 1.3, 0.9], 0, 5, 4, False),
        ([1.0, 1.0, 0.5, 0.5, 0.5], 1, 2, 0, True),
        ([0.5, 0.4, 0.3, 0.2, 0.1], 1, 5, 4, False),
        ([0.5, 0.6, 0.7, 0.8, 0.9], 9, 5, 0, False),
    ],
)
def test_training_stops_when_nothing_gets_better_and_keeps_the_best(nlls, patience, evaluations, kept, stopped):
    model = small("point")
    script = Script(model, nlls)
    state = make_fit(model, validate=script, epochs=5, patience=patience)()
    assert len(script.seen) == len(state.history) == evaluations
    assert state.stopped == stopped and state.step == 3 * evaluations
    assert_identical(parameters(model), script.seen[kept])
    assert not any(torch.equal(a, b) for a, b in zip(script.seen[0].values(), script.seen[1].values(), strict=True))


def test_the_best_is_kept_though_the_run_was_interrupted_after_it(tmp_path):
    kept = {"checkpoint": tmp_path / "c.safetensors", "checkpoint_seconds": 0}
    nlls = [1.0, 0.8, 0.9, 0.85, 0.1]
    whole = small("point")
    state = make_fit(whole, validate=Script(whole, nlls), epochs=5, patience=2)()
    first = small("point")
    with pytest.raises(ConnectionError):  # in the third epoch
        make_fit(first, validate=Script(first, nlls), epochs=5, patience=2, fit={**kept, "log": Figures(10)})()
    second = small("point")
    resumed = make_fit(second, validate=Script(second, nlls[2:]), epochs=5, patience=2, fit=kept)()
    assert_identical(parameters(second), parameters(whole))
    assert (resumed.history, resumed.best_nll, resumed.stopped) == (state.history, 0.8, True)
    third = small("point")  # and a run that has stopped stays so
    assert make_fit(third, validate=Script(third, []), epochs=5, patience=2, fit=kept)().stopped
    assert_identical(parameters(third), parameters(whole))


def test_evaluations_may_be_epochs_apart_but_the_last_epoch_is_evaluated():
    model = small("point")
    script = Script(model, [0.3, 0.2, 0.1])
    state = make_fit(model, validate=script, epochs=5, eval_every=2)()
    assert [record["epoch"] for record in state.history] == [2, 4, 5]
    assert [record["step"] for record in state.history] == [6, 12, 15]
    assert [record["validation"] for record in state.history] == [{"nll": 0.3}, {"nll": 0.2}, {"nll": 0.1}]


def test_the_training_nll_is_the_mean_over_the_questions_of_the_epoch():
    """Batches of 3, 3 and 1: a mean of batch means would count the last question three times."""
    figures = Figures()
    state = make_fit(small(), fit={"log": figures})()
    steps = figures["train/nll"]
    want = [(3 * a + 3 * b + c) / COUNT for a, b, c in (steps[:3], steps[3:])]
    assert [record["train_nll"] for record in state.history] == pytest.approx(want)


def test_the_history_keeps_both_kls_and_their_weight_at_the_end_of_every_epoch():
    figures = Figures()
    state = make_fit(small(), fit={"log": figures})()
    for name in ("inducing", "conditional"):
        assert [record["kl"][name] for record in state.history] == figures[f"train/kl_{name}"][2::3]
    assert [record["kl"]["weight"] for record in state.history] == figures["train/kl_weight"][2::3]


def test_all_figures_are_logged_apart():
    model, figures = small(), Figures()
    make_fit(model, fit={"log": figures})()
    posterior = find_holder(small()).posterior("default")
    kl = posterior.kl(posterior.draw(1, torch.Generator().manual_seed(_mix(0, 0, 0))))
    assert figures["train/kl_inducing"][0] == pytest.approx(float(kl["inducing"]), rel=1e-5)
    assert figures["train/kl_conditional"][0] == pytest.approx(float(kl["conditional"]), rel=1e-5)
    assert [row["step"] for row in figures.rows] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert len(figures["validation/nll"]) == 2


@dataclass
class Listener:
    """Keeps what people are told."""

    lines: list = field(default_factory=list)
    bar: list = field(default_factory=list)

    def stage(self, label):
        assert label == "training"
        return lambda done, total: self.bar.append((done, total))

    def say(self, text):
        self.lines.append(text)


def test_people_are_told():
    listener, model = Listener(), small("point")
    make_fit(model, validate=Script(model, [0.5, 0.75]), patience=1, fit={"report": listener})()
    assert listener.bar == [(k, STEPS) for k in range(STEPS)] + [(STEPS, STEPS)]
    assert listener.lines[0].startswith("epoch 1/2: train nll ") and "validation nll 0.5000" in listener.lines[0]
    assert listener.lines[-1] == "validation nll has not fallen for 1 evaluations: training ends early"


@pytest.mark.parametrize("given", [{"posterior": "swag"}, {"posterior": "point", "snapshots": 1, "members": 1}])
def test_people_are_told_that_the_best_state_has_nothing_to_draw_from(given):
    """Iterates and snapshots are collected from the second epoch on."""
    for nlls, patience, told in (([0.5, 0.75], 2, True), ([0.75, 0.5], 2, False), ([0.5, 0.75], 0, False)):
        listener, model = Listener(), adapted(**given, target_modules=["q_proj"])
        make_fit(model, validate=Script(model, nlls), patience=patience, fit={"report": listener})()
        assert find_holder(model).posterior("default").empty == told
        assert (
            listener.lines[-1] == "the best state is from before anything was collected to draw from, so all draws are "
            "equal; train with patience 0"
        ) == told


# Divergence -----------------------------------------------------------------------------------------------------------


def poison(model, prefix, at_step):
    """A log that puts NaN into a parameter after a step."""
    victim = next(p for name, p in find_holder(model).named_parameters() if name.split(".")[-1].startswith(prefix))

    def log(figures, step):
        if step == at_step and "train/nll" in figures:
            with torch.no_grad():
                victim.view(-1)[0] = torch.nan

    return log


@pytest.mark.parametrize(
    "posterior, prefix",
    some(
        [("point", "A"), *(("inducing", p) for p in ("z_row", "z_col", "log_d", "lambda", "mean", "sd_logit", "flow"))],
        [("point", "A"), ("inducing", "z_row"), ("inducing", "flow")],
    ),
)
def test_nan_in_any_parameter_is_named_and_the_good_checkpoint_kept(tmp_path, posterior, prefix):
    path, model = tmp_path / "c.safetensors", small(posterior)
    fit = {"checkpoint": path, "log": poison(model, prefix, at_step=4)}
    with pytest.raises(TrainingDiverged) as error:
        make_fit(model, fit=fit)()
    message = str(error.value)
    ids = ", ".join(f"q{number}" for number in order_of(seed=0)[1][6:])
    # the figures of step 4 are told when step 5 has been taken
    assert f"at step 6 of 6 (epoch 2, questions {ids}, ...)" in message
    assert f"the last good state is kept in {path}; try a lower learning rate" in message
    fresh = small(posterior)
    state = make_fit(fresh, fit={"checkpoint": path})()
    assert state.step == STEPS
    assert all(torch.isfinite(value).all() for value in parameters(fresh).values())


@pytest.mark.parametrize("posterior, prefix", [("point", "A"), ("inducing", "z_row")])
def test_parameters_that_are_not_finite_are_never_saved(tmp_path, posterior, prefix):
    path, model = tmp_path / "c.safetensors", small(posterior)
    fit = {"checkpoint": path, "checkpoint_seconds": 0, "log": poison(model, prefix, at_step=2)}
    with pytest.raises(TrainingDiverged, match="a parameter is no longer finite after step 2 of 6"):
        make_fit(model, fit=fit)()
    assert read_state(path)["step"] == 1


@pytest.mark.parametrize("posterior, prefix", [("point", "A"), ("inducing", "z_row"), ("inducing", "mean")])
def test_an_evaluation_that_is_not_finite_is_named(posterior, prefix):
    model = small(posterior)
    with pytest.raises(TrainingDiverged, match="evaluation after step 3 of 6: "):
        make_whole_fit(model, fit={"log": poison(model, prefix, at_step=3)})()


@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_moves_nothing(factor):
    model = small()
    before = parameters(model)
    victim = next(p for name, p in find_holder(model).named_parameters() if "sd_logit" in name)
    victim.register_hook(lambda gradient: gradient * factor)
    with pytest.raises(TrainingDiverged, match=r"gradient is (inf|nan) at step 1 of 6 \(epoch 1, .*\); try a lower"):
        make_fit(model)()
    assert_identical(parameters(model), before)


# What is left behind --------------------------------------------------------------------------------------------------


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


@pytest.mark.parametrize("fail_at", some([0, 2, 4], [0, 4]))
def test_the_global_random_states_are_left_alone(fail_at):
    before = random_states()
    try:
        make_whole_fit(gpt2_with_dropout(), fit={"log": Figures(fail_at)})()
    except ConnectionError:
        assert fail_at
    assert random_states() == before


@pytest.mark.parametrize("fail_at", [0, 2])
def test_what_the_model_uses_is_as_before(fail_at):
    model = small()
    model.deterministic()
    mode = find_holder(model)._mode
    try:
        make_whole_fit(model, fit={"log": Figures(fail_at)})()
        assert not model.training
    except ConnectionError:
        assert fail_at
    assert find_holder(model)._mode is mode


def test_the_base_model_is_not_trained():
    model, fresh = small(), small().state_dict()
    make_fit(model)()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, fresh[name])}
    assert moved == {name for name in fresh if "weight_posterior" in name}


@pytest.mark.parametrize("name", ["epochs", "batch_size", "learning_rate", "kl_beta", "draws", "rate_multipliers"])
def test_settings_that_are_left_open_are_refused(name):
    with pytest.raises(ValueError, match=rf"training setting '{name}' is open; use bayeslora\.train\.resolve"):
        make_fit(small("point"), **{name: None})


def test_training_learns():
    """Whatever is claimed above: the loss falls, for a point and for a posterior."""
    for posterior in ("point", "inducing"):
        model = adapted(posterior=posterior)
        state = make_fit(model, epochs=8, batch_size=COUNT, learning_rate=0.03, kl_beta=0.01)()
        assert state.history[-1]["train_nll"] < 0.7 * state.history[0]["train_nll"]


# Aiming ---------------------------------------------------------------------------------------------------------------


def fresh():
    """Its ``B`` begins at zero, as in a run."""
    return adapted(init_weights=True, target_modules=["q_proj"])


def test_the_first_step_of_a_run_that_aims_goes_further():
    """The mean of ``B`` gets the whole gradient, not only what chance has put into its directions."""
    sizes = []
    for aim in (0, 2):
        model = fresh()
        fit = make_fit(model, epochs=1, aim=aim, clip=UNCLIPPED, kl_beta=0.0)
        fit._aim()
        fit._take_step(0)
        stack = find_holder(model).get_parameter("bayeslora_posterior.default.mean_4x4").grad
        sizes.append(float(stack[len(stack) // 2 :].norm()))  # the second half belongs to B
    assert sizes[1] > 1.5 * sizes[0]


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_run_that_aims_and_goes_on_later_is_the_same_run(micro_batch, tmp_path):
    whole = fresh()
    make_fit(whole, aim=2, micro_batch=micro_batch)()

    def interrupted(done, total):
        if done == 3:
            raise KeyboardInterrupt

    kept = {"checkpoint": tmp_path / "state", "checkpoint_seconds": 0.0}
    report = SimpleNamespace(stage=lambda label: interrupted, say=lambda text: None)
    with pytest.raises(KeyboardInterrupt):
        make_fit(fresh(), aim=2, micro_batch=micro_batch, fit={**kept, "report": report})()
    model = fresh()
    later = make_fit(model, aim=2, micro_batch=micro_batch, fit=kept)
    later._aim = lambda: pytest.fail("aimed again")
    later()
    assert_identical(parameters(model), parameters(whole))
