"""Tokens predicted in a stream: against dense averages, dense metrics and a dense temperature."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from adapter.cases import MODELS, VOCABULARY, adapted, base_model, config
from bayeslora import find_holder, metrics
from bayeslora.adapter.sampling import Sampling
from bayeslora.errors import InputError
from bayeslora.predict.calibrate import Calibration, fit_temperature
from bayeslora.predict.mc import RunningAverage, average_draws
from bayeslora.predict.tokens import predictions as tokens
from bayeslora.predict.tokens.predictions import batch_texts, predict_tokens, score_tokens
from bayeslora.predict.tokens.predictor import TokenPredictor, read_token_predictions
from bayeslora.predict.tokens.temperature import fit_token_temperature
from bayeslora.tasks import EncodedText

SAMPLES = 3
FIELDS = ("label_probability", "confidence", "correct", "entropy", "brier")


def texts(count=7, seed=0):
    """Texts of all lengths, with prompts of one token and more."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, size=(count, 2))
    return [EncodedText(f"t{k}", *(rng.integers(1, 60, size=n).tolist() for n in pair)) for k, pair in enumerate(sizes)]


@pytest.fixture(scope="module")
def model():
    return adapted(posterior="meanfield")


def dense(model, given, samples=SAMPLES, seed=5):
    """Averaged probabilities of every text's targets, one text and one pass for all draws at a time."""
    holder, found = find_holder(model), []
    model.eval()
    for text in given:
        ids = torch.tensor([text.prompt_ids + text.target_ids])
        with torch.no_grad(), holder.restoring():
            if samples:
                holder.draw(samples, torch.Generator().manual_seed(seed))
            else:
                holder.deterministic()
            logits = model(input_ids=ids.repeat(max(1, samples), 1)).logits.double()
        start = len(text.prompt_ids) - 1
        found.append(logits.softmax(-1).mean(0)[start:-1])
    return found


def predicted(model, given, **changes):
    settings = {"samples": SAMPLES, "seed": 5, "batch_tokens": 40} | changes
    names = [name for name in settings if name in ("samples", "seed", "layers")]
    return list(predict_tokens(model, given, Sampling(**{name: settings.pop(name) for name in names}), **settings))


# The stream -----------------------------------------------------------------------------------------------------------


def test_a_running_average_is_the_average():
    log_p = torch.randn(5, 4, 9).log_softmax(-1)
    running = RunningAverage()
    for draw in log_p.clone():
        running.add(draw)
    torch.testing.assert_close(running.result(), average_draws(log_p))
    with pytest.raises(ValueError, match="no draws"):
        RunningAverage().result()


@pytest.mark.parametrize("samples", [0, 1, SAMPLES])
@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_distributions_are_those_of_one_text_at_a_time(model, samples, batch_tokens):
    given = texts()
    want = dense(model, given, samples)
    seen = []
    for part in predicted(model, given, samples=samples, batch_tokens=batch_tokens):
        wanted = torch.cat([want[row] for row in part.rows])
        torch.testing.assert_close(part.log_probabilities.exp().double(), wanted, atol=1e-5, rtol=1e-4)
        assert part.labels.tolist() == [token for row in part.rows for token in given[row].target_ids]
        seen += part.rows
    assert sorted(seen) == list(range(len(given)))


@pytest.mark.parametrize("samples", [0, SAMPLES])
def test_learnt_positions_do_not_count_the_padding_before_a_prompt(samples):
    model, given = adapted("gpt2", posterior="meanfield"), texts()
    want = dense(model, given, samples)
    (part,) = predicted(model, given, samples=samples, batch_tokens=10_000)
    wanted = torch.cat([want[row] for row in part.rows])
    torch.testing.assert_close(part.log_probabilities.exp().double(), wanted, atol=1e-5, rtol=1e-4)


READS_PADDING = {
    "rwkv": ({"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2, "context_length": 64}, "value"),
    "blenderbot": ({"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}, "q_proj"),
}


def reading_padding(kind):
    """A model that derives its state or its positions from the columns, whatever the mask and the positions are."""
    sizes, target = READS_PADDING[kind]
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=VOCABULARY, **sizes)).eval()
        for parameter in base.parameters():
            parameter.data.mul_(3)  # so that what a token sees matters
        return get_peft_model(base, config(target_modules=[target], posterior="meanfield")).eval()


@pytest.mark.parametrize("kind", READS_PADDING)
@pytest.mark.parametrize("samples", [0, SAMPLES])
def test_models_that_read_padding_are_given_prompts_of_one_length(kind, samples):
    model, given = reading_padding(kind), texts(12)
    want, batches = dense(model, given, samples), predicted(model, given, samples=samples, batch_tokens=10_000)
    lengths = [{len(given[row].prompt_ids) for row in part.rows} for part in batches]
    assert all(len(each) == 1 for each in lengths) and len(lengths) == len(set.union(*lengths)) < 12
    for part in batches:
        wanted = torch.cat([want[row] for row in part.rows])
        torch.testing.assert_close(part.log_probabilities.exp().double(), wanted, atol=1e-5, rtol=1e-4)
    assert sorted(row for part in batches for row in part.rows) == list(range(12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", MODELS)
def test_models_of_attention_share_batches(architecture, dtype):
    """Found out once per base model, at the mean, and only where prompts differ in length."""
    model, passes = get_peft_model(base_model(architecture).to(dtype), config(architecture)).train(), []
    model.register_forward_pre_hook(lambda *given: passes.append(model.training))
    assert len(predicted(model, texts(1), samples=0)) == 1
    assert passes == [False]
    assert len(predicted(model, texts(), samples=0, batch_tokens=10_000)) == 1
    assert not any(passes)
    passes.clear()
    assert len(predicted(model, texts(), samples=0, batch_tokens=10_000)) == 1
    assert passes == [False] and model.training


@pytest.mark.parametrize("kind", READS_PADDING)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_hide_that_padding_is_read(kind, dtype):
    model, given = reading_padding(kind).to(dtype), texts(12)
    for parameter in model.parameters():
        parameter.data.div_(3)  # what a token sees matters little here, but more than round-off
    for part in predicted(model, given, samples=0, batch_tokens=10_000):
        assert len({len(given[row].prompt_ids) for row in part.rows}) == 1


def test_draws_are_one_network_each_for_all_texts_and_differ(model):
    given = texts()
    one, two = (predicted(model, given, seed=seed, batch_tokens=10**6)[0] for seed in (5, 6))
    assert not torch.allclose(one.log_probabilities, two.log_probabilities, atol=1e-4)


def test_no_batch_is_larger_than_its_limits(model, monkeypatch):
    given, vocabulary = texts(30), model.config.vocab_size
    sizes = []

    def watch(chosen, pad_id, device):
        batch = batch_texts(chosen, pad_id, device)
        sizes.append((len(chosen), *batch.input_ids.shape, batch.targets.numel()))
        return batch

    monkeypatch.setattr(tokens, "batch_texts", watch)
    monkeypatch.setattr(tokens, "CELLS", 20 * vocabulary)
    for _ in predict_tokens(model, given, Sampling(2), batch_tokens=50):
        pass
    assert sum(count for count, *_ in sizes) == 30 and len(sizes) > 5
    assert all(count == 1 or (count * (width + 1) <= 50 and cells <= 20) for count, _, width, cells in sizes)


def test_logits_of_one_draw_at_a_time_are_all_that_is_computed(model):
    """No forward pass sees more rows than the batch has texts, whatever the number of draws."""
    rows = []
    predicted(model, texts(4))  # finds out whether prompts may be padded
    handle = model.get_base_model().lm_head.register_forward_hook(lambda m, a, output: rows.append(output.shape[0]))
    try:
        predicted(model, texts(4), batch_tokens=10**6, samples=4)
    finally:
        handle.remove()
    assert rows == [4] * 4


def test_the_model_is_left_as_it_was(model):
    model.train()
    predicted(model, texts(2))
    assert model.training and find_holder(model)._mode.kind == "automatic"


def test_scores_that_are_not_numbers_are_refused(model):
    broken = adapted(posterior="point")
    with torch.no_grad():
        next(p for n, p in broken.named_parameters() if "embed_tokens" in n).fill_(float("nan"))
    with pytest.raises(ArithmeticError, match="not numbers"):
        predicted(broken, texts(1))


# Scores ---------------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_dense_metrics():
    log_p = (3 * torch.randn(40, 23)).log_softmax(-1)
    labels = torch.randint(0, 23, (40,))
    got, want = score_tokens(log_p, labels), metrics.token_scores(log_p.exp().numpy(), labels.numpy())
    for name in FIELDS:
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-6, err_msg=name)


def test_probabilities_that_float32_cannot_hold_keep_the_nll_finite():
    log_p = torch.tensor([[0.0, -200.0]])
    assert score_tokens(log_p, torch.tensor([1])).nll == pytest.approx(200.0)


def test_only_what_is_impossible_has_an_infinite_nll():
    """At a low temperature even float64 cannot hold what is possible; probability 0 is for what is not."""
    log_p = torch.tensor([[0.0, -2000.0, -torch.inf]])
    assert 700 < score_tokens(log_p, torch.tensor([1])).nll < 750
    assert score_tokens(log_p, torch.tensor([2])).nll == np.inf


def test_a_predictor_gives_the_scores_of_all_tokens_in_the_order_of_the_texts(model):
    given = texts()
    predictions = TokenPredictor(model, sampling=Sampling(SAMPLES, 5), batch_tokens=40)(given)
    probabilities = torch.cat(dense(model, given)).numpy()
    want = metrics.token_scores(probabilities, np.concatenate([text.target_ids for text in given]))
    for name in FIELDS:
        np.testing.assert_allclose(getattr(predictions.scores, name), getattr(want, name), rtol=1e-3, atol=1e-5)
    assert predictions.lengths == tuple(len(text.target_ids) for text in given)
    figures = predictions.metrics()
    assert repr(predictions).startswith(f"TokenPredictions({len(given)} texts, {len(predictions.scores)} tokens, acc ")
    assert figures["nll"] == pytest.approx(want.nll, rel=1e-5) and figures["ece"] == pytest.approx(want.ece(), abs=1e-5)
    assert figures["brier"] == pytest.approx(want.brier_score, rel=1e-5)


def test_uncertain_tokens_are_those_of_the_reference(model):
    given = texts(40)
    reference = TokenPredictor(adapted(posterior="point"), sampling=Sampling(0))(given)
    predictions = TokenPredictor(model, sampling=Sampling(2))(given).with_reference(reference, "lora")
    share = int(np.ceil(0.05 * len(reference.scores)))
    chosen = np.argsort(-reference.scores.entropy, kind="stable")[:share]
    assert np.flatnonzero(predictions.uncertain).tolist() == sorted(chosen.tolist())
    subset = predictions.scores.subset(np.sort(chosen))
    figures = predictions.metrics()
    assert figures["uncertain_nll"] == subset.nll and figures["uncertain_ece"] == subset.ece()
    assert figures["uncertain_brier"] == subset.brier_score


def test_a_reference_of_other_tokens_is_refused(model):
    one, other = (TokenPredictor(model, sampling=Sampling(0))(texts(3, seed)) for seed in (0, 1))
    with pytest.raises(InputError, match=r"^there: was evaluated on other tokens"):
        one.with_reference(other, "there")


def test_what_is_written_is_read_again(model, tmp_path):
    given = texts()
    predictions = TokenPredictor(model, sampling=Sampling(0))(given)
    for kept in (predictions, predictions.with_reference(predictions, "itself")):
        kept.write(tmp_path / "tokens.safetensors")
        again = read_token_predictions(tmp_path / "tokens.safetensors")
        assert again.metrics() == kept.metrics() and again.lengths == kept.lengths and again.digest == kept.digest
    (tmp_path / "torn").write_bytes((tmp_path / "tokens.safetensors").read_bytes()[:60])
    for name in ("torn", "missing"):
        with pytest.raises(InputError, match="is no complete file of token scores"):
            read_token_predictions(tmp_path / name)


# Temperature ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 2.5, 8.0])
def test_the_temperature_of_a_stream_is_the_dense_one(sharpness):
    torch.manual_seed(1)
    true = (2 * torch.randn(400, 31)).log_softmax(-1)
    labels = torch.distributions.Categorical(logits=true).sample()
    log_p = (sharpness * true).log_softmax(-1)
    chunks = list(zip(log_p.split(37), labels.split(37), strict=True))
    found = fit_token_temperature(lambda number, sweeps: chunks)
    assert found == pytest.approx(fit_temperature(log_p.numpy(), labels.numpy()), rel=1e-4)


@pytest.mark.parametrize("label, temperature", [(0, 0.05), (1, 20.0)])
def test_data_that_do_not_determine_a_temperature_give_an_end_of_its_range(label, temperature):
    log_p = torch.tensor([[0.9, 0.1]]).log()
    found = fit_token_temperature(lambda number, sweeps: [(log_p, torch.tensor([label]))])
    assert found == pytest.approx(temperature) == fit_temperature(log_p.numpy(), [label])


def test_where_nothing_depends_on_the_temperature_it_is_one():
    log_p = torch.full((1, 4), 0.25).log()
    assert fit_token_temperature(lambda number, sweeps: [(log_p, torch.tensor([2]))]) == 1.0


def test_a_predictor_fits_and_applies_the_temperature(model):
    given = texts(30)
    predictor = TokenPredictor(model, sampling=Sampling(2, 5), batch_tokens=60)
    told = []
    temperature = predictor.fit_temperature(given, lambda done, total: told.append((done, total)))
    log_p = torch.cat(dense(model, given, 2)).log()
    labels = np.concatenate([text.target_ids for text in given])
    assert temperature == pytest.approx(fit_temperature(log_p.numpy(), labels), rel=1e-3)
    warm = TokenPredictor(model, sampling=Sampling(2, 5), batch_tokens=60, calibration=Calibration(temperature=3.0))
    assert warm.fit_temperature(given) == pytest.approx(temperature, rel=1e-6)
    assert told[-1] == (60, 60) and all(a[0] < b[0] for a, b in itertools.pairwise(told))
    cooled = TokenPredictor(model, sampling=Sampling(2, 5), calibration=Calibration(temperature=2.0))(given)
    want = metrics.token_scores((log_p / 2.0).softmax(-1).numpy(), labels)
    np.testing.assert_allclose(cooled.scores.brier, want.brier, atol=1e-5)
    assert (cooled.scores.correct == predictor(given).scores.correct).all()
