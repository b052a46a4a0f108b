"""The harness's model against plain computations: every draw alone, as an ordinary LoRA adapter that was exported."""

from __future__ import annotations

import functools
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bayeslora import BayesLoraConfig, find_holder, hub_access
from bayeslora.errors import InputError
from bayeslora.posterior import LaplaceConfig
from tasks.cases import write_lines
from train.tiny import model_directory, question, read_json

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from bayeslora.lm_eval import BayesLoraLM
from bayeslora.lm_eval.__main__ import main

pytestmark = pytest.mark.system

SEED = 7
DRAWS = 3
PAIRS = [
    ("Is it even?", " yes"),
    ("Is it even?", " no"),
    ("Question: Is 12 even? Answer:", " who knows, not me"),
    ("Answer:", " A"),
    ("Answer:", " B"),
    ("", "Is it even?"),
    ("Options: A B C D", " or none of them at all"),
]
TEXTS = ["Is it even? Who knows. " * 6, "yes", "Question: Options: A B C D Answer: no"]
QUIET = {"until": ["###"], "max_gen_toks": 7, "do_sample": False}


def base():
    return AutoModelForCausalLM.from_pretrained(model_directory()).eval()


def save_adapter(directory, **settings):
    """An adapter that does something. The head is adapted too, and is larger than the tokenizer."""
    given = {"posterior": "inducing", "init_weights": False, "r": 2, "target_modules": ["q_proj", "v_proj", "lm_head"]}
    config = BayesLoraConfig(task_type="CAUSAL_LM", **(given | settings))
    get_peft_model(base(), config).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return save_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def networks(adapter, tmp_path_factory):
    """The mean and the draws, each a model of its own without anything of ours in it."""
    adapted = PeftModel.from_pretrained(base(), adapter).eval()
    generator = torch.Generator().manual_seed(SEED)
    paths = adapted.export_samples(DRAWS, tmp_path_factory.mktemp("exported"), generator)
    mean, *draws = [PeftModel.from_pretrained(base(), path).merge_and_unload().eval() for path in paths]
    return SimpleNamespace(mean=mean, draws=draws)


def harness(adapter, samples=DRAWS, **options):
    given = {"pretrained": model_directory(), "seed": SEED, "device": "cpu", "batch_size": 12} | options
    return BayesLoraLM(peft=adapter, samples=samples, **given)


def stock(model, **options):
    return HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(model_directory()), **options)


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=given, idx=0) for given in arguments]


def loglikelihoods(lm, pairs=PAIRS):
    return lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)


def rolling(lm, texts=TEXTS):
    return lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,) for text in texts]), disable_tqdm=True)


def generated(lm, contexts, **settings):
    requests = instances("generate_until", [(context, QUIET | settings) for context in contexts])
    return lm.generate_until(requests, disable_tqdm=True)


def encoded(lm, pairs=PAIRS):
    for context, continuation in pairs:
        if context:
            yield lm._encode_pair(context, continuation)
        else:
            yield [lm.prefix_token_id], lm.tok_encode(continuation)


@torch.no_grad()
def total(model, context, continuation):
    """Log-likelihood of one sequence, alone in its pass."""
    ids = torch.tensor([context + continuation])
    log_p = model(ids).logits[0, len(context) - 1 : -1].double().log_softmax(-1)
    return float(log_p.gather(1, torch.tensor(continuation)[:, None]).sum())


def log_mean_exp(values):
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values) / len(values))


@torch.no_grad()
def next_tokens(models, ids, count):
    """Greedy decoding from the averaged distribution, one whole pass per token and draw."""
    ids = list(ids)
    for _ in range(count):
        mean = sum(model(torch.tensor([ids])).logits[0, -1].double().softmax(-1) for model in models)
        ids.append(int(mean.argmax()))
    return ids[-count:]


# Log-likelihoods --------------------------------------------------------------------------------------------------


def test_sequences_are_averaged_over_draws_in_probability(adapter, networks):
    lm = harness(adapter)
    got = [value for value, _ in loglikelihoods(lm)]
    singles = [[total(model, *pair) for model in networks.draws] for pair in encoded(lm)]
    assert got == pytest.approx([log_mean_exp(values) for values in singles], abs=1e-4)
    assert max(max(values) - min(values) for values in singles) > 0.1  # the draws differ
    assert abs(got[-1] - sum(singles[-1]) / DRAWS) > 1e-3  # and the average is not one of logarithms


def test_greedy_is_what_the_averaged_next_token_distribution_says(adapter, networks):
    lm = harness(adapter)
    context = lm.tok_encode(PAIRS[2][0])
    best = next_tokens(networks.draws, context, 4)
    other = [*best[:3], (best[3] + 1) % 289]
    answers = lm._loglikelihood_tokens([(None, context, best), (None, context, other)], disable_tqdm=True)
    assert [greedy for _, greedy in answers] == [True, False]


def test_no_samples_are_the_posterior_mean_in_the_stock_model(adapter, networks):
    got, want = loglikelihoods(harness(adapter, 0)), loglikelihoods(stock(networks.mean))
    assert [value for value, _ in got] == pytest.approx([value for value, _ in want], abs=1e-4)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]


def test_one_sample_is_one_draw_in_the_stock_model(adapter, tmp_path):
    adapted = PeftModel.from_pretrained(base(), adapter).eval()
    path = adapted.export_samples(1, tmp_path, torch.Generator().manual_seed(SEED))[1]
    single = stock(PeftModel.from_pretrained(base(), path).merge_and_unload().eval())
    one = harness(adapter, 1)
    for of in (loglikelihoods, rolling):
        assert torch.tensor(of(one)).flatten() == pytest.approx(torch.tensor(of(single)).flatten(), rel=5e-7, abs=1e-4)
    contexts = [context for context, _ in PAIRS if context]
    assert generated(one, contexts) == generated(single, contexts)


@pytest.mark.parametrize("batch_size", [1, 4, 7, 64, "auto"])
def test_answers_do_not_depend_on_the_batch_size(adapter, batch_size):
    lm, other = harness(adapter, batch_size=batch_size, max_batch_size=8), harness(adapter)
    assert [value for value, _ in loglikelihoods(lm)] == pytest.approx([v for v, _ in loglikelihoods(other)], abs=1e-4)
    assert rolling(lm) == pytest.approx(rolling(other), abs=1e-4)
    contexts = ["Is it even?", "Answer:", "Question: Options: A B"]
    assert generated(lm, contexts) == generated(other, contexts)


def test_all_draws_share_a_pass_that_is_as_large_as_was_asked_for(adapter):
    lm, passes = harness(adapter, batch_size=6), []
    lm.model.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    loglikelihoods(lm)
    # last tokens behind the same context share a row: five rows, two at a time, which three draws make six
    assert passes == [2, 2, 1]


def test_long_requests_lose_their_first_tokens_as_in_the_stock_model(adapter, networks):
    pairs = [("Is it even? " * 9, " yes or no")]
    got, want = (
        loglikelihoods(lm, pairs) for lm in (harness(adapter, 0, max_length=10), stock(networks.mean, max_length=10))
    )
    assert got[0][0] == pytest.approx(want[0][0], abs=1e-4)
    with pytest.raises(InputError, match=r"continuation has .* the model sees 3 only"):
        loglikelihoods(harness(adapter, 0, max_length=3), pairs)


def test_windows_of_a_text_are_added_up_before_draws_are_averaged(adapter, networks):
    lm = harness(adapter, max_length=16)
    windows = [list(lm._windows(text)) for text in TEXTS]
    assert len(windows[0]) > 2
    sums = [[sum(total(model, *window) for window in of) for model in networks.draws] for of in windows]
    assert rolling(lm) == pytest.approx([log_mean_exp(values) for values in sums], abs=1e-4)
    mean = harness(adapter, 0, max_length=16)
    assert rolling(mean) == pytest.approx(rolling(stock(networks.mean, max_length=16)), abs=1e-4)
    assert rolling(lm, [""]) == [0.0]


def test_only_averages_reach_the_cache(adapter):
    lm, cached = harness(adapter), {}
    lm.set_cache_hook(SimpleNamespace(add_partial=lambda kind, key, value: cached.__setitem__((kind, key), value)))
    answers, texts = loglikelihoods(lm), rolling(lm)
    want = {("loglikelihood", pair): answer for pair, answer in zip(PAIRS, answers, strict=True)}
    want |= {("loglikelihood_rolling", (text,)): value for text, value in zip(TEXTS, texts, strict=True)}
    assert cached == want


def test_a_posterior_without_noise_needs_one_pass_whatever_the_samples(tmp_path):
    path = save_adapter(tmp_path, posterior="point")
    many, none = harness(path, 5), harness(path, 0)
    assert many.draws == 1
    assert loglikelihoods(many) == loglikelihoods(none)


def test_draws_follow_from_the_seed_and_the_scale_of_calibration_is_left_out(adapter, tmp_path):
    want = loglikelihoods(harness(adapter))
    assert loglikelihoods(harness(adapter)) == want
    assert loglikelihoods(harness(adapter, seed=SEED + 1)) != want
    adapted = PeftModel.from_pretrained(base(), adapter)
    adapted.posterior_scale = 3.0
    adapted.save_pretrained(tmp_path)
    assert read_json(tmp_path / "adapter_config.json")["posterior_scale"] == 3.0
    assert loglikelihoods(harness(str(tmp_path))) == want


# Generation -------------------------------------------------------------------------------------------------------


def test_texts_follow_the_averaged_next_token_distribution(adapter, networks):
    lm = harness(adapter)
    contexts = ["Is it even?", "Answer:", "Question: Options: A B C D"]
    tokens = [next_tokens(networks.draws, lm.tok_encode(context), QUIET["max_gen_toks"]) for context in contexts]
    assert generated(lm, contexts) == [lm.tok_decode(own) for own in tokens]
    alone = [
        [next_tokens([model], lm.tok_encode(c), QUIET["max_gen_toks"]) for c in contexts] for model in networks.draws
    ]
    assert tokens not in alone  # no draw by itself writes them


def test_texts_end_where_they_are_told_to(adapter):
    lm = harness(adapter)
    (text,) = generated(lm, ["Is it even?"])
    stop = text[len(text) // 2]
    assert generated(lm, ["Is it even?"], until=[stop]) == [text.split(stop)[0]]


def test_several_draws_have_one_beam_and_the_mean_has_more(adapter):
    with pytest.raises(InputError, match=r"with 3 draws there is one beam, .* samples=0 for the posterior mean"):
        generated(harness(adapter), ["Answer:"], num_beams=2)
    assert len(generated(harness(adapter, 0), ["Answer:"], num_beams=2)) == 1


def test_tokens_may_be_sampled(adapter):
    lm, texts = harness(adapter), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts += generated(lm, ["Answer:"], do_sample=True, temperature=1.5)
    assert texts[0] == texts[1] != texts[2]


# Input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [-1, "many", 1.5])
def test_samples_are_a_number(adapter, samples):
    with pytest.raises(InputError, match=r"samples is .*; give 0 for the posterior mean"):
        harness(adapter, samples)


def test_an_adapter_of_ours_is_needed(adapter, tmp_path):
    with pytest.raises(InputError, match="add peft=DIRECTORY"):
        harness(None)
    with pytest.raises(InputError, match="nowhere: no adapter can be read"):
        harness(str(tmp_path / "nowhere"))
    get_peft_model(base(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    with pytest.raises(InputError, match="kind LORA, not one of bayeslora; use --model hf"):
        harness(str(tmp_path / "lora"))
    save_adapter(tmp_path / "run" / "adapter")
    with pytest.raises(InputError, match=r"is a run; pass its adapter: peft=.*run/adapter"):
        harness(str(tmp_path / "run"))


def test_an_adapter_is_loaded_completely_or_not_at_all(adapter, tmp_path):
    """PEFT alone would take random numbers in the place of missing ones, and read pickles."""
    file = "adapter_model.safetensors"

    def changed(name, change):
        place = tmp_path / name
        shutil.copytree(adapter, place)
        tensors = load_file(place / file)
        change(tensors)
        save_file(tensors, place / file, {"format": "pt"})
        return place

    with pytest.raises(InputError, match="lacks a tensor of the adapter"):
        harness(str(changed("less", lambda tensors: tensors.popitem())))
    with pytest.raises(InputError, match="holds NaN or infinity"):
        harness(str(changed("broken", lambda tensors: next(iter(tensors.values())).fill_(math.nan))))
    pickled = changed("pickled", lambda tensors: None)
    torch.save(load_file(pickled / file), pickled / "adapter_model.bin")
    (pickled / file).unlink()
    with pytest.raises(InputError, match=r"pickled: has no adapter_model.safetensors"):
        harness(str(pickled))


def test_an_adapter_of_another_model_is_told(tmp_path):
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=300
    )
    given = BayesLoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(LlamaForCausalLM(config), given).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"a tensor of the adapter, .* restore both files"):
        harness(str(tmp_path))


def test_an_adapter_of_the_hub_is_fetched_without_code_and_pickles(adapter, monkeypatch):
    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return adapter

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert loglikelihoods(harness("org/adapter", revision="v1")) == loglikelihoods(harness(adapter))
    ((name, revision, files),) = asked
    assert (name, revision) == ("org/adapter", "v1") and "adapter_model.safetensors" in files
    assert all(it.endswith((".json", ".safetensors")) for it in files)


def test_the_base_model_and_known_options_are_needed(adapter):
    with pytest.raises(InputError, match="add pretrained=MODEL"):
        harness(adapter, pretrained=None)
    with pytest.raises(InputError, match=r"an option is not known .*'sample'.* check the names in --model_args"):
        harness(adapter, sample=3)


def test_a_linearised_posterior_has_a_mean_only(tmp_path):
    path = save_adapter(tmp_path, posterior="laplace", settings=LaplaceConfig(), init_weights=True)
    with pytest.raises(InputError, match=r"linearised model.*samples=0"):
        harness(path)
    assert find_holder(harness(path, 0).model) is not None


def test_the_base_model_is_looked_up_as_everywhere_else(adapter, tmp_path, monkeypatch):
    from bayeslora.models import BUILTINS
    from bayeslora.models.locate import Builtin

    monkeypatch.setitem(BUILTINS, "tiny", Builtin("", "", lambda: None, model_directory))
    assert loglikelihoods(harness(adapter, pretrained="tiny")) == loglikelihoods(harness(adapter))
    with pytest.raises(InputError, match="no such directory"):
        harness(adapter, pretrained=str(tmp_path / "nowhere"))


# The command line -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A directory with a multiple-choice task of its own."""
    directory = tmp_path_factory.mktemp("task")
    write_lines(directory / "questions.jsonl", [question(number) for number in range(6)])
    settings = {
        "task": "evens",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(directory / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (directory / "evens.yaml").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def words(adapter, task, *more, samples=DRAWS):
    model = f"pretrained={model_directory()},peft={adapter},samples={samples},seed={SEED}"
    return ["--model", "bayeslora", "--model_args", model, "--tasks", "evens", "--include_path", str(task), *more]


def check_results(out, adapter, networks):
    """The files that the harness wrote, against every draw alone."""
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_evens_*.jsonl")
    lm, right = harness(adapter), []
    for line in map(json.loads, samples.read_text(encoding="utf-8").splitlines()):
        pairs = [(line["doc"]["question"], " " + choice) for choice in line["doc"]["choices"]]
        want = [log_mean_exp([total(m, *p) for m in networks.draws]) for p in encoded(lm, pairs)]
        assert [float(answer[0][0]) for answer in line["resps"]] == pytest.approx(want, abs=1e-4)
        right.append(want.index(max(want)) == line["doc"]["answer"])
    assert len(right) == 6
    assert read_json(results)["results"]["evens"]["acc,none"] == pytest.approx(sum(right) / len(right))


@pytest.fixture
def own_tasks_only(monkeypatch, tmp_path):
    """Leaves the harness's thousands of tasks unread, which takes it many seconds, and the user's cache alone."""
    import datasets
    import lm_eval.tasks

    quick = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", quick)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("own_tasks_only")
@pytest.mark.parametrize("verb", [["run"], []])
def test_the_command_line_evaluates_and_writes_its_results(
    adapter, networks, task, tmp_path, monkeypatch, capsys, verb
):
    out = ["--device", "cpu", "--batch_size", "8", "--log_samples", "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["bayeslora.lm_eval", *verb, *words(adapter, task, *out)])
    runpy.run_module("bayeslora.lm_eval", run_name="__main__")
    assert "evens" in capsys.readouterr().out
    check_results(tmp_path / "out", adapter, networks)


@pytest.mark.slow
def test_the_command_line_works_in_a_process_of_its_own(adapter, networks, task, tmp_path):
    out = ["--device", "cpu", "--batch_size", "8", "--log_samples", "--output_path", str(tmp_path / "out")]
    command = [sys.executable, "-W", "ignore", "-m", "bayeslora.lm_eval", *words(adapter, task, *out)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    check_results(tmp_path / "out", adapter, networks)


def complaint(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["bayeslora.lm_eval", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code, capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("own_tasks_only")
def test_mistakes_are_one_line_and_exit_code_two(adapter, task, monkeypatch, capsys):
    code, line = complaint(monkeypatch, capsys, words(adapter, task, samples=-1))
    assert code == 2 and line == "bayeslora: samples is -1.0; give 0 for the posterior mean, or more"
    arguments = [it.replace("evens", "odds") for it in words(adapter, task)]
    code, line = complaint(monkeypatch, capsys, arguments)
    assert code == 2 and line == "bayeslora: Tasks not found: odds; python -m bayeslora.lm_eval ls tasks lists them"


@pytest.mark.usefixtures("own_tasks_only")
@pytest.mark.parametrize("missing", ["model", "data"])
def test_without_a_network_what_is_not_here_is_one_line(adapter, task, tmp_path, monkeypatch, capsys, missing):
    monkeypatch.setattr(hub_access, "reachable", lambda address: False)
    arguments = words(adapter, task, "--device", "cpu")
    if missing == "model":
        arguments = [it.replace(model_directory(), "org/nothing") for it in arguments]
        told = "bayeslora: org/nothing: not in the local cache, and the hub cannot be reached; run `hf download org/nothing`"
    else:
        settings = read_json(task / "evens.yaml") | {"dataset_path": "org/nothing", "dataset_kwargs": None}
        (tmp_path / "evens.yaml").write_text(json.dumps(settings), encoding="utf-8")
        arguments[arguments.index(str(task))] = str(tmp_path)
        told = "bayeslora: Couldn't reach 'org/nothing' on the Hub (OfflineModeIsEnabled); check the network, or choose tasks"
    code, line = complaint(monkeypatch, capsys, arguments)
    assert code == 2 and line.startswith(told)


def test_a_missing_harness_is_one_line_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, line = complaint(monkeypatch, capsys, ["ls", "tasks"])
    assert code == 2 and line.endswith("run: pip install 'lm-eval<0.5'")
