"""Text from the average of the draws, against a plain loop without cache, hooks or batches."""

import math

import pytest
import torch
from peft import get_peft_model
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM, TextIteratorStreamer

from adapter.cases import MODELS, adapted, config, foreign_model, generator, logits
from bayeslora import find_holder
from bayeslora.adapter.foreign import FOREIGN
from bayeslora.errors import InputError
from bayeslora.predict.generation import Generation, Writing, encode_prompts, generate, generate_apart
from bayeslora.predict.generation.results import HALF, End
from bayeslora.predict.mc import LEAST_PROBABILITY, posterior_predictive
from train.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
PROMPTS = ["the urn holds", "red", "a ball is drawn from the bag and"]
SHORT = Writing(max_new_tokens=5)


def writer(**settings):
    """A tiny Llama that knows the tokenizer, with an adapter whose draws differ."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=300,
                initializer_range=0.2,
            )
        )
    base.generation_config.eos_token_id = TOKENIZER.eos_token_id
    return get_peft_model(base.eval(), config(**settings)).eval()


@torch.no_grad()
def by_hand(model, ids, *, samples, seed, steps, layers="all", pick=None):
    """Tokens with probability and entropies: every draw alone, the whole text anew at every step."""
    holder = find_holder(model)
    rows = []
    with holder.restoring():
        holder.draw(samples, generator(seed), layers=layers)
        model(torch.tensor([ids] * samples))  # settles which layers draw
        held = holder._mode.held["default"]
        for _ in range(steps):
            draws = []
            for k in range(samples):
                holder._mode.held["default"] = held.pick(k, 1)
                draws.append(model(torch.tensor([ids])).logits[0, -1].double().softmax(-1))
            draws = torch.stack(draws)
            mean = draws.mean(0)
            token = int(mean.argmax()) if pick is None else pick(mean)
            aleatoric = -(draws * draws.log()).sum(-1).mean()
            rows.append((token, float(mean[token]), float(-(mean * mean.log()).sum()), float(aleatoric)))
            ids = [*ids, token]
    return rows


def assert_matches(got: Generation, rows):
    tokens, probabilities, entropy, aleatoric = (list(column) for column in zip(*rows, strict=True))
    assert list(got.token_ids) == tokens
    assert got.probabilities == pytest.approx(probabilities, rel=1e-4)
    assert got.entropy == pytest.approx(entropy, abs=1e-4)
    assert got.aleatoric == pytest.approx(aleatoric, abs=1e-4)
    assert got.epistemic == pytest.approx([a - b for a, b in zip(entropy, aleatoric, strict=True)], abs=2e-4)
    assert got.log_likelihood == pytest.approx(sum(map(math.log, probabilities)), abs=1e-3)
    assert got.mutual_information == pytest.approx(sum(got.epistemic))


@pytest.mark.parametrize("layers", ["all", "last:1"])
@pytest.mark.parametrize("samples", [1, 3])
def test_the_most_probable_tokens_of_the_average(samples, layers):
    model = writer()
    for prompt in PROMPTS:
        (got,) = generate(model, TOKENIZER, [prompt], SHORT, samples=samples, layers=layers)
        ids = TOKENIZER(prompt).input_ids
        assert_matches(got, by_hand(model, ids, samples=samples, seed=0, steps=len(got.token_ids), layers=layers))
        assert got.text == TOKENIZER.decode(got.token_ids, skip_special_tokens=True).rstrip(HALF)
        assert samples == 1 or max(got.epistemic) > 1e-3


@pytest.mark.parametrize("architecture", MODELS)
def test_every_architecture(architecture):
    """With its own cache, on token ids."""
    model = adapted(architecture)
    ids = torch.tensor([[5, 9, 33, 2]])
    with posterior_predictive(model, samples=3, seed=1):
        written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    rows = by_hand(model, ids[0].tolist(), samples=3, seed=1, steps=4)
    assert written[0, 4:].tolist() == [row[0] for row in rows][: written.shape[1] - 4]


def test_averages_are_those_of_evaluation_though_the_model_is_in_training():
    """In which a mixture over snapshots would be the point that is trained."""
    model = adapted(posterior="decoupled", settings={"components": 1}, snapshots=2, members=2)
    for step in (1, 2):
        with torch.no_grad():
            for parameter in find_holder(model).parameters():
                parameter.mul_(1.5)
        find_holder(model).after_step(step, 2)
    found = []
    for training in (False, True):
        with posterior_predictive(model.train(training), samples=2):
            found.append(logits(model))
        assert model.training == training
    assert torch.equal(*found)


def test_the_base_model_is_not_averaged():
    """Without its adapters a model has no draws to average: not even where rows could be taken for them."""
    model = adapted()
    with model.disable_adapter():
        plain = logits(model)
    with posterior_predictive(model, samples=2), model.disable_adapter():
        assert torch.equal(logits(model), plain)


def test_a_batch_of_prompts_equals_each_alone():
    model = writer()
    together = generate(model, TOKENIZER, PROMPTS, SHORT, samples=3)
    for prompt, got in zip(PROMPTS, together, strict=True):
        (alone,) = generate(model, TOKENIZER, [prompt], SHORT, samples=3)
        assert got.token_ids == alone.token_ids
        assert got.probabilities == pytest.approx(alone.probabilities, rel=1e-3)
        assert got.epistemic == pytest.approx(alone.epistemic, abs=1e-3)


@pytest.mark.parametrize("writing", [SHORT, Writing(max_new_tokens=8, temperature=0.8, top_p=0.9, seed=3)])
def test_one_draw_is_plain_generation(writing):
    """To the token, greedy and sampled: the model with that draw and transformers' own generate."""
    model = writer()
    (got,) = generate(model, TOKENIZER, PROMPTS[:1], writing, samples=1)
    given = TOKENIZER(PROMPTS[:1], return_tensors="pt")
    with model.draws(1, generator(writing.seed)), torch.random.fork_rng():
        torch.manual_seed(writing.seed)
        plain = model.generate(
            input_ids=given["input_ids"], attention_mask=given["attention_mask"], **writing.arguments(TOKENIZER)
        )
    assert list(got.token_ids) == plain[0, given["input_ids"].shape[1] :].tolist()


def test_equal_draws_are_one_draw():
    model = writer()
    model.posterior_scale = 0.0
    one = generate(model, TOKENIZER, PROMPTS, SHORT, samples=1)
    for got, want in zip(generate(model, TOKENIZER, PROMPTS, SHORT, samples=4), one, strict=True):
        assert got.token_ids == want.token_ids and max(got.epistemic) < 1e-5
        assert got.probabilities == pytest.approx(want.probabilities, rel=1e-4)


def test_no_draws_mean_the_posterior_mean():
    model = writer()
    (got,) = generate(model, TOKENIZER, PROMPTS[:1], SHORT, samples=0)
    given = TOKENIZER(PROMPTS[:1], return_tensors="pt")
    plain = model.generate(**{k: given[k] for k in ("input_ids", "attention_mask")}, **SHORT.arguments(TOKENIZER))
    assert list(got.token_ids) == plain[0, given["input_ids"].shape[1] :].tolist() and max(got.epistemic) == 0.0


def test_sampled_tokens_come_from_the_average():
    """Frequencies of the first token over many prompts at once, against the averaged distribution."""
    model = writer()
    ids = TOKENIZER("red").input_ids
    seen = []
    by_hand(model, ids, samples=3, seed=7, steps=1, pick=lambda mean: seen.append(mean) or 0)
    (mean,) = seen
    count = 2000
    written = generate(model, TOKENIZER, ["red"] * count, Writing(max_new_tokens=1, temperature=1.0, seed=7), samples=3)
    tokens = torch.bincount(torch.tensor([got.token_ids[0] for got in written]), minlength=len(mean))
    bins = mean * count > 5
    chi_square = float(((tokens[bins] - mean[bins] * count) ** 2 / (mean[bins] * count)).sum())
    assert chi_square < int(bins.sum()) + 4 * math.sqrt(2 * int(bins.sum()))


def test_seeds_and_top_k():
    model = writer()
    bold = [generate(model, TOKENIZER, PROMPTS, Writing(max_new_tokens=12, temperature=1.5, seed=s)) for s in (1, 1, 2)]
    assert bold[0] == bold[1] != bold[2]
    timid = generate(model, TOKENIZER, PROMPTS, Writing(max_new_tokens=5, temperature=1.5, top_k=1))
    cold = generate(model, TOKENIZER, PROMPTS, Writing(max_new_tokens=5, temperature=1e-160, top_p=1e-300))
    assert [got.token_ids for got in cold] == [got.token_ids for got in timid]
    assert [got.token_ids for got in timid] == [got.token_ids for got in generate(model, TOKENIZER, PROMPTS, SHORT)]


def test_stop_texts_end_single_rows():
    model = writer()
    whole = generate(model, TOKENIZER, PROMPTS, Writing(max_new_tokens=12))
    stop = TOKENIZER.decode(whole[0].token_ids[3:5])
    cut = generate(model, TOKENIZER, PROMPTS, Writing(max_new_tokens=12, stop=(stop,)))
    assert cut[0].text == whole[0].text[: whole[0].text.index(stop)]
    length = len(cut[0].token_ids)
    assert length <= 5 and cut[0].token_ids == whole[0].token_ids[:length]
    assert cut[0].probabilities == pytest.approx(whole[0].probabilities[:length], rel=1e-4)
    for got, want in zip(cut[1:], whole[1:], strict=True):
        if stop not in want.text:
            assert got.token_ids == want.token_ids and len(got.entropy) == len(got.token_ids)


def test_a_stop_text_does_not_begin_in_the_prompt():
    model = writer()
    whole = generate(model, TOKENIZER, PROMPTS, Writing(max_new_tokens=6))
    stop = PROMPTS[0][-1] + whole[0].text[:2]
    assert not any(stop in got.text for got in whole)
    settings = Writing(max_new_tokens=6, stop=(stop,))
    assert [it.token_ids for it in generate(model, TOKENIZER, PROMPTS, settings)] == [it.token_ids for it in whole]
    assert generate_apart(model, TOKENIZER, PROMPTS[0], settings, samples=1) == generate_apart(
        model, TOKENIZER, PROMPTS[0], Writing(max_new_tokens=6), samples=1
    )


def test_the_end_token_ends_a_row_and_belongs_to_it():
    model = writer()
    (whole,) = generate(model, TOKENIZER, PROMPTS[:1], Writing(max_new_tokens=6))
    model.generation_config.eos_token_id = [whole.token_ids[2], 299]
    first = whole.token_ids.index(whole.token_ids[2])
    got = generate(model, TOKENIZER, PROMPTS, Writing(max_new_tokens=6))[0]
    assert got.token_ids == whole.token_ids[: first + 1] and len(got.probabilities) == first + 1


def test_a_stream_and_a_chat():
    model = writer()
    messages = [{"role": "user", "content": "red or blue"}]
    with pytest.raises(InputError, match="no chat template; give the prompt as plain text"):
        generate(model, TOKENIZER, [messages], SHORT)
    chatty = make_tokenizer()
    chatty.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}answer:{% endif %}"
    )
    strict = make_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="chat template refuses the messages: roles must alternate"):
        generate(model, strict, [messages], SHORT)
    (chat,) = generate(model, chatty, [messages], SHORT, samples=2)
    streamer = TextIteratorStreamer(chatty, skip_prompt=True, timeout=30)
    (plain,) = generate(model, chatty, ["user: red or blue answer:"], SHORT, samples=2, streamer=streamer)
    assert plain.token_ids == chat.token_ids
    assert "".join(streamer) == chatty.decode(plain.token_ids)


def test_the_most_probable_tokens_of_every_step():
    model = writer()
    (got,) = generate(model, TOKENIZER, PROMPTS[:1], SHORT, samples=3, top=4)
    seen = []
    ids = TOKENIZER(PROMPTS[0]).input_ids
    by_hand(model, ids, samples=3, seed=0, steps=5, pick=lambda mean: seen.append(mean) or int(mean.argmax()))
    assert len(got.top) == 5
    for ranked, mean in zip(got.top, seen, strict=True):
        best = mean.log().topk(4)
        assert [token for token, _ in ranked] == best.indices.tolist()
        assert [value for _, value in ranked] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert Generation.of(got.text, got.tokens, ended=got.ended) == got
    assert not got.ended and generate(model, TOKENIZER, PROMPTS[:1], SHORT, samples=3)[0].top == ()


@pytest.mark.parametrize("samples", [0, 3])
@pytest.mark.parametrize("writing", [SHORT, Writing(max_new_tokens=8, temperature=1.5, seed=3)])
def test_a_watcher_is_told_every_token_and_may_use_the_model(writing, samples):
    model = writer()
    given = TOKENIZER(PROMPTS[1], return_tensors="pt")["input_ids"]
    with torch.no_grad(), model.draws(2, generator(4)):
        want = model(given.repeat(2, 1)).logits
    told = {row: [] for row in range(len(PROMPTS))}

    def watch(tokens):
        for row, token in tokens.items():
            told[row].append(token)
        torch.rand(3)
        with torch.no_grad(), model.draws(2, generator(4)):
            assert torch.equal(model(given.repeat(2, 1)).logits, want)

    watched = generate(model, TOKENIZER, PROMPTS, writing, samples=samples, top=2, watch=watch)
    assert watched == generate(model, TOKENIZER, PROMPTS, writing, samples=samples, top=2)
    assert [told[row] for row in range(len(PROMPTS))] == [got.tokens for got in watched]


def test_a_watcher_is_told_nothing_of_rows_that_have_ended_and_can_end_all():
    model = writer()
    whole = generate(model, TOKENIZER, PROMPTS, Writing(max_new_tokens=6))
    model.generation_config.eos_token_id = [whole[0].token_ids[2]]
    told = []
    got = generate(model, TOKENIZER, PROMPTS, Writing(max_new_tokens=6), watch=lambda tokens: told.append(set(tokens)))
    for row, one in enumerate(got):
        assert sum(row in rows for rows in told) == len(one.token_ids)
        assert one.ended == (one.token_ids[-1] == whole[0].token_ids[2])
    told.clear()
    model.generation_config.eos_token_id = None
    stopped = Writing(max_new_tokens=6, stop=(TOKENIZER.decode(whole[0].token_ids[2:3]),))
    got = generate(model, TOKENIZER, PROMPTS, stopped, watch=lambda tokens: told.append(set(tokens)))
    assert len(got[0].token_ids) < max(len(one.token_ids) for one in got)
    assert [sum(row in rows for rows in told) for row in range(len(got))] == [len(one.token_ids) for one in got]
    before = find_holder(model)._mode
    with pytest.raises(ZeroDivisionError):
        generate(model, TOKENIZER, PROMPTS, SHORT, watch=lambda tokens: 1 / 0)
    assert find_holder(model)._mode is before


def test_generations_are_a_table_each_and_all_together():
    found = generate(writer(), TOKENIZER, PROMPTS, Writing(max_new_tokens=4), samples=3)
    for generation in found:
        frame = generation.to_pandas()
        assert frame["id"].tolist() == list(generation.token_ids)
        assert frame["epistemic"].sum() == pytest.approx(generation.mutual_information)
        said = f"4 tokens, cut off, log-probability {generation.log_probability:.3f}, epistemic"
        assert said in repr(generation) and "\n" not in repr(generation)
    frame = found.to_pandas()
    assert frame["text"].tolist() == [it.text for it in found] and frame["tokens"].tolist() == [4] * len(found)
    assert (frame["entropy"] - frame["aleatoric"]).tolist() == pytest.approx(frame["epistemic"].tolist(), abs=1e-4)


def test_every_draw_writes_its_own():
    model = writer()
    texts = generate_apart(model, TOKENIZER, PROMPTS[0], SHORT, samples=3)
    holder = find_holder(model)
    draws = holder.posterior("default").draw(3, generator(0))
    for k, text in enumerate(texts):
        with holder.restoring():
            holder.use({"default": draws.pick(k).detach()})
            given = TOKENIZER(PROMPTS[:1], return_tensors="pt")
            plain = model.generate(
                **{n: given[n] for n in ("input_ids", "attention_mask")}, **SHORT.arguments(TOKENIZER)
            )
        whole = TOKENIZER.decode(plain[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text == whole.rstrip(HALF)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_settings_of_the_model_do_not_change_what_is_written(temperature):
    """Many models come with a penalty on repetition: the most probable token would be another than the distribution says."""
    model, settings = writer(), Writing(max_new_tokens=12, temperature=temperature, seed=2)
    want = generate(model, TOKENIZER, PROMPTS, settings, samples=2)
    apart = generate_apart(model, TOKENIZER, PROMPTS[0], settings, samples=2)
    own = model.generation_config
    for name, value in {
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": [5, 6],
        "top_k": 1,
    }.items():
        setattr(own, name, value)
    assert generate(model, TOKENIZER, PROMPTS, settings, samples=2) == want
    assert generate_apart(model, TOKENIZER, PROMPTS[0], settings, samples=2) == apart
    assert model.generation_config is own and own.repetition_penalty == 1.5


def test_texts_end_with_the_tokens_of_the_model_and_of_the_tokenizer():
    model = writer()
    (whole,) = generate(model, TOKENIZER, PROMPTS[:1], Writing(max_new_tokens=6))
    for place, ends in enumerate(([whole.token_ids[1]], whole.token_ids[1])):
        model.generation_config.eos_token_id = ends if place else None
        tokenizer = make_tokenizer()
        tokenizer.eos_token_id = 299 if place else whole.token_ids[1]
        (got,) = generate(model, tokenizer, PROMPTS[:1], Writing(max_new_tokens=6))
        assert got.ended and got.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[1]) + 1]
        assert generate_apart(model, tokenizer, PROMPTS[0], Writing(max_new_tokens=6), samples=1)


def test_nothing_is_left_behind(monkeypatch):
    model = writer().train()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    before = find_holder(model)._mode
    monkeypatch.setattr(model.base_model.model, "generate", lambda **given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, TOKENIZER, PROMPTS, SHORT)
    assert model.training and find_holder(model)._mode is before
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; give a whole number of at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0; give a finite number of at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; give a finite number above 0 and of at most 1"),
        ({"top_k": -1}, "top_k is -1; give a whole number of at least 0"),
        ({"seed": 2**64}, f"seed is {2**64}; give a number below 2^64"),
        ({"stop": ("a", "")}, "stop holds an empty text"),
        ({"stop": "END"}, "stop is 'END'; give a list of texts: ['END']"),
        ({"logit_bias": {5: 1.0}}, "logit_bias is a dictionary; give pairs of a token and its bias"),
    ],
)
def test_writing_that_cannot_be(settings, message):
    with pytest.raises(InputError) as error:
        Writing(**settings)
    assert str(error.value).startswith(message)


def test_a_model_that_has_diverged_writes_nothing():
    model = writer()
    with torch.no_grad():
        model.get_base_model().lm_head.get_base_layer().weight[3] = math.nan
    with pytest.raises(ArithmeticError, match=r"not numbers \(nan\): its adapter has diverged"):
        generate(model, TOKENIZER, PROMPTS, SHORT)


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([], "there are no prompts"),
        (["a", ""], "prompt 2 is empty"),
        (["a\ud800"], "prompt 1 is no valid Unicode"),
        ([{"role": "user", "content": "Hi!"}], "prompt 1 is a single message; give a chat as a list of messages"),
        ({"role": "user", "content": "Hi!"}, "prompt 1 is a single message; give a chat as a list of messages"),
        ([[]], "the model's chat template refuses the messages"),
        ([[{"role": "user", "content": None}]], "the model's chat template refuses the messages: can only concatenate"),
        (["a" * 2048], "a prompt has 2048 tokens, and the model's context length is 2048; shorten it"),
    ],
)
def test_prompts_that_cannot_be(prompts, message):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    with pytest.raises(InputError, match=message):
        generate(writer(), tokenizer, prompts, SHORT)


def test_a_text_begins_as_the_tokenizer_begins_it_and_is_open_at_its_end():
    """Some tokenizers put the end token behind every text, too."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A <|end|>", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
    )
    plain = tokenizer("ab", add_special_tokens=False).input_ids
    assert encode_prompts(tokenizer, ["ab"]) == [[tokenizer.eos_token_id, *plain]]


def test_a_token_may_be_less_probable_than_float32_can_say():
    model = writer()
    with torch.no_grad():
        model.get_base_model().lm_head.weight.mul_(300)
    (likely,) = generate(model, TOKENIZER, ["ab"], Writing(max_new_tokens=1), top=model.config.vocab_size)
    token, log_probability = likely.top[0][-1]
    assert log_probability < -120
    (forced,) = generate(model, TOKENIZER, ["ab"], Writing(max_new_tokens=1, logit_bias=((token, 1e6),)))
    assert forced.token_ids == (token,)
    assert forced.log_likelihood == pytest.approx(max(log_probability, math.log(LEAST_PROBABILITY)), rel=1e-5)


def test_a_text_that_is_cut_off_ends_with_a_whole_character():
    ids = TOKENIZER("ab😀").input_ids
    assert TOKENIZER.decode(ids[:-1]).endswith(HALF)
    assert End.find(ids[:-1], set(), (), TOKENIZER) == End(len(ids) - 1, "ab", False)
    assert End.find(ids, set(), (), TOKENIZER).text == "ab😀"


def test_adapters_of_pefts_own_write_with_one_draw_at_most():
    model = foreign_model(FOREIGN["pvera"])
    with posterior_predictive(model, samples=1), torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    with pytest.raises(InputError, match="cannot average their draws"), posterior_predictive(model, samples=2):
        pass
