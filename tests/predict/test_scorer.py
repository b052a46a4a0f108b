"""Many questions under the same draws, whatever the batches, against one question and one draw at a time."""

from contextlib import nullcontext

import pytest
import torch
from peft import PeftModel

from adapter.cases import MODELS, adapted, base_model, generator
from bayeslora import find_holder
from bayeslora.adapter.sampling import Sampling
from bayeslora.predict import pack, score_options
from bayeslora.predict.questions.scorer import DrawScores, Scorer, batches_by_length, packed_length
from bayeslora.predict.questions.scores import score_questions
from bayeslora.predict.questions.sharing import may_share_rows
from predict.test_options import naive, questions

SEED = 5


def scored(model, items, *, samples=3, batch_tokens=10_000, seed=SEED, advance=None, **settings):
    sampling = Sampling(samples, seed, **settings)
    return score_questions(Scorer(model), items, sampling, batch_tokens=batch_tokens, advance=advance)


def assert_same(got, want, tolerance=1e-5):
    for name in ("log_probabilities", "totals"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=tolerance, rtol=1e-5)


def use_draw(model, draw):
    """Let the model use one set of factors."""
    find_holder(model).use({"default": draw})


def reference(model, items):
    """Totals and normalised means of all questions, one sequence per option."""
    width = max(len(item.option_ids) for item in items)
    totals = torch.full((len(items), width), -torch.inf)
    log_probabilities = totals.clone()
    for row, item in enumerate(items):
        total = naive(model, item)
        lengths = torch.tensor([len(option) for option in item.option_ids])
        totals[row, : len(total)] = total
        log_probabilities[row, : len(total)] = (total / lengths).log_softmax(0)
    return totals.double(), log_probabilities.double()


@pytest.mark.parametrize("architecture", MODELS)
def test_folded_draws_equal_separate_passes_of_the_same_draws(architecture):
    model, items = adapted(architecture), questions(count=5)
    scores = scored(model, items)
    draws = find_holder(model).posterior("default").draw(3, generator(SEED))
    for k in range(3):
        use_draw(model, draws.pick(k))
        totals, log_probabilities = reference(model, items)
        torch.testing.assert_close(scores.totals[k], totals, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(scores.log_probabilities[k], log_probabilities, atol=1e-5, rtol=1e-5)
    assert (scores.log_probabilities[0] - scores.log_probabilities[1]).nan_to_num().abs().max() > 1e-3


def test_folded_draws_equal_the_exported_adapters(tmp_path):
    model, items = adapted(), questions(count=5)
    scores = scored(model, items, samples=2)
    exported = model.export_samples(2, tmp_path / "out", generator(SEED))[1:]
    for k, path in enumerate(exported):
        totals, log_probabilities = reference(PeftModel.from_pretrained(base_model(), path).eval(), items)
        torch.testing.assert_close(scores.totals[k], totals, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(scores.log_probabilities[k], log_probabilities, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 40, 75, 200])
@pytest.mark.parametrize("samples", [0, 3])
def test_scores_do_not_depend_on_the_size_of_batches(batch_tokens, samples):
    model, items = adapted(), questions(count=9)
    assert_same(scored(model, items, samples=samples, batch_tokens=batch_tokens), scored(model, items, samples=samples))


@pytest.mark.parametrize("seed", [0, 1])
def test_scores_do_not_depend_on_the_other_questions(seed):
    model, items = adapted(), questions(seed, count=7)
    together = scored(model, items)
    order = torch.randperm(7, generator=generator(seed)).tolist()
    shuffled = scored(model, [items[row] for row in order])
    assert_same(shuffled, DrawScores(together.log_probabilities[:, order], together.totals[:, order]))
    for row, item in enumerate(items):
        own = len(item.option_ids)
        alone = scored(model, [item])
        assert_same(
            alone,
            DrawScores(together.log_probabilities[:, [row], :own], together.totals[:, [row], :own]),
        )


def test_options_that_a_question_lacks_are_impossible_and_the_others_sum_to_one():
    items = questions(count=8)
    counts = [len(item.option_ids) for item in items]
    assert len(set(counts)) > 1
    scores = scored(adapted(), items, batch_tokens=60)
    present = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    for values in (scores.log_probabilities, scores.totals):
        assert values.shape == (3, 8, max(counts)) and values.dtype == torch.float64
        assert torch.equal(values > -torch.inf, present.expand(3, -1, -1))
    torch.testing.assert_close(scores.log_probabilities.exp().sum(-1), torch.ones(3, 8).double(), atol=1e-6, rtol=0)


def test_the_predictive_distribution_is_the_mean_of_probabilities():
    scores = scored(adapted(), questions(count=6), samples=4)
    want = scores.log_probabilities.exp().mean(0)
    torch.testing.assert_close(torch.from_numpy(scores.predictive).exp(), want, atol=1e-12, rtol=0)


def test_no_samples_mean_the_posterior_mean():
    model, items = adapted(), questions()
    got = scored(model, items, samples=0)
    totals, log_probabilities = reference(model, items)
    assert_same(got, DrawScores(log_probabilities[None], totals[None]), tolerance=1e-4)


@pytest.mark.parametrize("samples", [0, 1, 7])
def test_a_point_is_scored_once_whatever_the_samples(samples):
    model, items, passes = adapted(posterior="point"), questions(), []
    assert may_share_rows(model, items)  # which takes a pass to find out
    model.get_base_model().register_forward_hook(lambda *_: passes.append(1))
    scores = scored(model, items, samples=samples)
    assert len(scores.totals) == 1 and len(passes) == 1
    assert torch.equal(scores.totals, scored(model, items, samples=2, seed=99).totals)


def test_an_ensemble_of_k_members_is_scored_by_each_of_them():
    model, items = adapted(posterior="ensemble", settings={"members": 3}), questions()
    scores = scored(model, items, samples=3)
    members = {tuple(draw[0, :2].tolist()) for draw in scores.totals}
    assert len(members) == 3


def test_draws_follow_from_the_seed_and_nothing_else():
    model, items = adapted(), questions()
    first = scored(model, items)
    torch.manual_seed(7)
    model.seed_draws(3)
    assert torch.equal(scored(model, items).totals, first.totals)
    assert not torch.equal(scored(model, items, seed=SEED + 1).totals, first.totals)
    before = torch.get_rng_state()
    scored(model, items)
    assert torch.equal(torch.get_rng_state(), before)


class Failing(Scorer):
    def __call__(self, items, draws=1):
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize(
    "make, outcome", [(Scorer, nullcontext()), (Failing, pytest.raises(RuntimeError, match="out of memory"))]
)
def test_the_model_is_left_as_it_was(training, samples, make, outcome):
    model = adapted().train(training)
    model.draw(2, generator(1))
    mode = find_holder(model)._mode
    with outcome:
        score_questions(make(model), questions(), Sampling(samples), batch_tokens=100)
    assert model.training == training and find_holder(model).training == training
    assert find_holder(model)._mode is mode
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("posterior", ["point", "inducing"])
def test_scores_that_are_not_numbers_are_an_error(posterior):
    model = adapted(posterior=posterior)
    with torch.no_grad():
        for parameter in find_holder(model).parameters():
            parameter.fill_(torch.nan)
    with pytest.raises(ArithmeticError, match=r"not numbers|not finite"):
        scored(model, questions())
    assert not model.training and find_holder(model)._mode.kind == "automatic"


def test_scoring_is_done_in_evaluation_mode():
    """Dropout of a model that is being trained has no say in its validation."""
    model, items = adapted("gpt2"), questions()
    want = scored(model, items)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    assert torch.equal(scored(model.train(), items).totals, want.totals)


def test_progress_counts_every_question_once():
    items, told = questions(count=9), []
    scored(adapted(), items, batch_tokens=90, advance=lambda done, total: told.append((done, total)))
    done = [count for count, _ in told]
    assert done == sorted(set(done)) and len(done) > 1
    assert told[-1] == (9, 9) and {total for _, total in told} == {9}


@pytest.mark.parametrize("tokens", [1, 30, 64, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_batches_hold_every_question_once_and_fit(tokens, seed):
    items = questions(seed, count=11)
    batches = list(batches_by_length(items, tokens))
    assert sorted(row for rows in batches for row in rows) == list(range(11))
    sums = [sum(packed_length(items[row]) for row in rows) for rows in batches]
    assert all(total <= tokens or len(rows) == 1 for total, rows in zip(sums, batches, strict=True))
    for total, following in zip(sums, batches[1:], strict=False):
        assert total + packed_length(items[following[0]]) > tokens  # no batch ends before it is full
    lengths = [packed_length(items[row]) for rows in batches for row in rows]
    assert lengths == sorted(lengths, reverse=True)


def test_a_batch_of_draws_fits_into_the_tokens():
    """Counted in a layer, where the batch has been repeated for every draw."""
    items, sizes = questions(count=9), []
    model = adapted()
    model.get_base_model().model.layers[0].register_forward_hook(
        lambda layer, args, output: sizes.append(output.shape[:2].numel())
    )
    longest = max(map(packed_length, items))
    scored(model, items, samples=3, batch_tokens=9 * longest)
    assert 3 * longest <= max(sizes) <= 1.3 * 9 * longest
    assert len(sizes) > 1


@pytest.mark.parametrize("draws", [1, 3])
def test_a_scorer_is_the_packed_pass_of_all_its_draws(draws):
    model, items = adapted(), questions()
    with torch.no_grad(), model.draws(draws, generator()):
        scores = Scorer(model, pad_id=7)(items, draws)
        want = score_options(model, pack(items), copies=draws)
    torch.testing.assert_close(scores.total, want.total, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("layers", ["all", "last:1"])
@pytest.mark.parametrize("samples", [3, 7])
def test_more_draws_than_fit_at_once_are_cut_into_parts(samples, layers):
    model, items = adapted(), questions(count=3)
    longest = max(map(packed_length, items))
    want = scored(model, items, samples=samples, layers=layers)
    for at_once in (1, 2):
        got = scored(model, items, samples=samples, layers=layers, batch_tokens=at_once * longest)
        assert_same(got, want)


@pytest.mark.parametrize(
    "full", [torch.cuda.OutOfMemoryError("full"), torch.AcceleratorError("CUDA error: out of memory\nSearch for it")]
)
def test_a_full_gpu_means_smaller_parts(full, monkeypatch):
    model, items, tried = adapted(), questions(count=5), []
    want = scored(model, items)
    whole = Scorer.__call__

    def limited(self, part, draws=1):
        tried.append(draws * sum(map(packed_length, part)))
        if tried[-1] > 120:
            raise full
        return whole(self, part, draws)

    monkeypatch.setattr(Scorer, "__call__", limited)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert_same(scored(model, items), want)
    assert max(tried) > 120 >= tried[-1]
    monkeypatch.setattr(Scorer, "__call__", lambda *args: limited(*args[:1], list(args[1]) * 99))
    with pytest.raises(type(full)):
        scored(model, items)


def test_another_failure_is_not_tried_again(monkeypatch):
    model, items, tried = adapted(), questions(count=5), []

    def broken(self, part, draws=1):
        tried.append(part)
        raise RuntimeError("bug")

    monkeypatch.setattr(Scorer, "__call__", broken)
    with pytest.raises(RuntimeError, match="bug"):
        scored(model, items)
    assert len(tried) == 1
