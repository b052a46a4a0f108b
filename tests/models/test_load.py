from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bayeslora.errors import InputError
from bayeslora.models import LoadedModel, convert_gguf, four_bit, load, load_model, locate
from bayeslora.models.device import resolve_device, resolve_dtype

from .ggufs import Recipe, tiny_model

HUB_ID = "no-such-org/no-such-model"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    convert_gguf(Recipe().write(tiny_model("llama"), folder / "m.gguf"), folder / "model")
    return folder / "model"


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def _message(name: str | Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_model(str(name), **({"device": "cpu"} | options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_directory_is_loaded(directory: Path) -> None:
    loaded = load_model(str(directory), device="cpu")
    assert isinstance(loaded, LoadedModel) and loaded.name == str(directory)
    assert loaded.model.dtype == torch.float32 and loaded.model.device.type == "cpu" and not loaded.model.training
    original = tiny_model("llama")
    ids = torch.arange(4, 20).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, original(ids).logits, atol=1e-5, rtol=1e-5)
    assert loaded.tokenizer("the").input_ids


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtype_by_name(directory: Path, name: str) -> None:
    assert load_model(str(directory), dtype=name, device="cpu").model.dtype == getattr(torch, name)


def test_attention_by_name(directory: Path) -> None:
    assert load_model(str(directory), device="cpu", attention="eager").model.config._attn_implementation == "eager"


def test_a_missing_pad_token_becomes_the_end_token(directory: Path) -> None:
    _edit(directory / "tokenizer_config.json", pad_token=None, padding_side="right")
    tokenizer = load_model(str(directory), device="cpu").tokenizer
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.padding_side == "right"


def test_a_pad_token_that_the_model_does_not_know_becomes_the_end_token(directory: Path) -> None:
    tokenizer = load_model(str(directory), device="cpu").tokenizer
    tokenizer.add_tokens([f"<{number}>" for number in range(1000)])
    tokenizer.pad_token = "<999>"
    tokenizer.save_pretrained(directory)
    assert load_model(str(directory), device="cpu").tokenizer.pad_token == "<|im_end|>"
    _edit(directory / "tokenizer_config.json", eos_token=None)
    assert "neither a pad nor an end token" in _message(directory)


def test_the_users_settings_of_transformers_are_left_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logging, bars, before = transformers.utils.logging, [], transformers.utils.logging.get_verbosity()
    monkeypatch.setattr(logging, "is_progress_bar_enabled", lambda: True)
    monkeypatch.setattr(logging, "disable_progress_bar", lambda: bars.append("off"))
    monkeypatch.setattr(logging, "enable_progress_bar", lambda: bars.append("on"))
    logging.set_verbosity_info()
    load_model(str(directory), device="cpu")
    (directory / "tokenizer.json").unlink()
    _message(directory)
    assert logging.get_verbosity() == logging.INFO and bars == ["off", "on", "off", "on"]
    logging.set_verbosity(before)


def test_nothing_but_one_error_is_said(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _edit(directory / "config.json", num_hidden_layers=3)
    _message(directory)
    assert capfd.readouterr() == ("", "")


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(content) and None


def _cut(name: str, part: float) -> Callable[[Path], None]:
    def cut(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[: int(part * len(content))])

    return cut


def _drop_tensor(directory: Path) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})


def _only_pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _config(**values: Any) -> Callable[[Path], None]:
    return lambda directory: (directory / "config.json").write_text(json.dumps(values)) and None


def _change(name: str, **values: Any) -> Callable[[Path], None]:
    return lambda directory: _edit(directory / name, **values)


def _remove(*names: str) -> Callable[[Path], None]:
    return lambda directory: [(directory / name).unlink() for name in names] and None


def _adapter(directory: Path) -> None:
    (directory / "config.json").rename(directory / "adapter_config.json")


def _sharded_with_a_hole(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    shards = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (_remove("config.json"), "has no config.json"),
    "adapter": (_adapter, "holds an adapter, not a model"),
    "config not JSON": (_write("config.json", b"{"), "its config.json cannot be used: .*not a valid JSON"),
    "config empty": (_write("config.json", b"{}"), "its config.json cannot be used"),
    "config a list": (_write("config.json", b"[]"), "its config.json cannot be used"),
    "config value": (_change("config.json", hidden_size="wide"), "its config.json cannot be used"),
    "unknown type": (_config(model_type="hal9000"), "its config.json cannot be used: .*hal9000"),
    "own code": (_config(model_type="x", auto_map={"AutoConfig": "c.C"}), "needs code of its own"),
    "BERT": (_config(model_type="bert", architectures=["BertForMaskedLM"]), "is a BertForMaskedLM, not a causal"),
    "T5": (_config(model_type="t5", architectures=["T5ForConditionalGeneration"]), "is a T5ForCond.*, not a causal"),
    "T5 without class": (_config(model_type="t5"), "is a t5, not a causal"),
    "no head": (_config(model_type="llama", architectures=["LlamaModel"]), "is a LlamaModel, not a causal"),
    "no tokenizer": (_remove("tokenizer.json", "tokenizer_config.json"), "no tokenizer can be loaded"),
    "tokenizer damaged": (_cut("tokenizer.json", 0.5), "no tokenizer can be loaded"),
    "tokenizer config damaged": (_write("tokenizer_config.json", b"["), "no tokenizer can be loaded"),
    "no pad, no end": (
        _change("tokenizer_config.json", pad_token=None, eos_token=None),
        "neither a pad nor an end token",
    ),
    "no weights": (_remove("model.safetensors"), "has no safetensors weights"),
    "pickle": (_only_pickle, "has no safetensors weights; other formats can run code"),
    "weights cut": (_cut("model.safetensors", 0.5), r"model\.safetensors is damaged or incomplete"),
    "weights a few bytes": (_write("model.safetensors", b"1234"), r"model\.safetensors is damaged or incomplete"),
    "weights empty": (_write("model.safetensors", b""), r"model\.safetensors is damaged or incomplete"),
    "weights garbage": (_write("model.safetensors", b"\xff" * 99), r"model\.safetensors is damaged or incomplete"),
    "weights of another size": (_change("config.json", intermediate_size=96), "shapes of its weights do not fit"),
    "tensor missing": (_drop_tensor, r"its weights lack 1 tensors, such as 'model\.norm\.weight'"),
    "shard missing": (_sharded_with_a_hole, "its weights cannot be loaded"),
}


@pytest.mark.parametrize("spoil, message", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_directory_is_one_clear_line(directory: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(directory)
    with pytest.raises(InputError, match=message) as caught:
        load_model(str(directory), device="cpu")
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "fp8"}, "unknown dtype 'fp8'; choose one of auto, float32, bfloat16, float16"),
    "device": ({"device": "gpu"}, "unknown device 'gpu'; choose one of auto, cpu, cuda, cuda:N, mps"),
    "other device": ({"device": "xla"}, "unknown device 'xla'; choose"),
    "empty device": ({"device": ""}, "unknown device ''; choose"),
    "CUDA device": ({"device": "cuda:77"}, "device 'cuda:77' is not available"),
    "bits": ({"bits": 3}, "cannot quantise to 3 bits; choose 4 or 8"),
    "attention": ({"attention": "magic"}, "cannot use attention 'magic', try 'sdpa' or 'eager'"),
    "revision": ({"revision": "v1"}, "revision 'v1' was given, but .* is not a hub model"),
}


@pytest.mark.parametrize("options, message", OPTIONS.values(), ids=OPTIONS)
def test_a_bad_option_is_one_clear_line(directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_model(str(directory), **({"device": "cpu"} | options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["", "./no", "/no/model", "~/no", "a/b/c", "a/", "a\\b", "~nobody/x", "/" + 5000 * "x"]
)
def test_a_path_that_is_not_there(name: str) -> None:
    assert "no such directory" in _message(name)


@pytest.mark.parametrize("name", ["smollm", "smolm2", "SmolLM2", "smollm-2", "smollm3"])
def test_a_typo_of_a_built_in_model(name: str) -> None:
    assert _message(name) == f"unknown model {name!r}; did you mean 'smollm2'?"


def test_files_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "is a GGUF file; convert it first: bayeslora convert" in _message(tmp_path / "m.gguf")
    (tmp_path / "m.txt").write_bytes(b"")
    assert "is not a directory" in _message(tmp_path / "m.txt")


@pytest.mark.parametrize("name", [HUB_ID, "no-such-model-at-all"])
def test_offline_without_the_model_in_the_cache(name: str) -> None:
    message = _message(name)
    assert "not in the local cache" in message and f"`hf download {name}`" in message and "local directory" in message


def test_an_impossible_hub_id() -> None:
    assert "no valid hub id" in _message("white space")


HUB_ERRORS = {
    errors.GatedRepoError: "the model is gated; accept its terms",
    errors.RepositoryNotFoundError: "no such model on the hub, or a private one",
    errors.RevisionNotFoundError: "revision 'v9' does not exist",
    errors.LocalEntryNotFoundError: "the hub cannot be reached",
    ConnectionError: "the hub cannot be reached",
}


@pytest.mark.parametrize("loader", [AutoConfig, AutoTokenizer, AutoModelForCausalLM])
@pytest.mark.parametrize("kind", HUB_ERRORS, ids=lambda kind: kind.__name__)
def test_errors_of_the_hub(
    directory: Path, monkeypatch: pytest.MonkeyPatch, loader: type, kind: type[Exception]
) -> None:
    """The hub's own error is the cause of a general one, whichever file it came from."""

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("We could not\nload it") from kind.__new__(kind)

    real = {each: each.from_pretrained for each in (AutoConfig, AutoTokenizer)}
    for each, load_it in real.items():
        monkeypatch.setattr(each, "from_pretrained", lambda *a, load_it=load_it, **o: load_it(directory))
    monkeypatch.setattr(loader, "from_pretrained", fail)
    message = _message(HUB_ID, revision="v9")
    assert message.startswith(f"{HUB_ID}: ") and HUB_ERRORS[kind] in message


def test_damaged_weights_of_a_hub_model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "model.safetensors").write_bytes(b"1234")
    for each in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        real = each.from_pretrained
        monkeypatch.setattr(each, "from_pretrained", lambda name, real=real, **options: real(directory, **options))
    message = _message(HUB_ID)
    assert "a file of its weights is damaged or incomplete" in message and "remove the model from the cache" in message


@pytest.mark.parametrize(
    "failure, bits",
    [
        (torch.OutOfMemoryError("out of memory"), None),
        (torch.OutOfMemoryError("out of memory"), 4),
        (torch.AcceleratorError("CUDA error: out of memory"), None),
        (OSError(28, "No space left on device"), None),
        (OSError(28, "No space left on device"), 8),
        (RuntimeError("bug"), None),
    ],
)
def test_a_real_failure_is_not_called_bad_input(
    directory: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, bits: Any
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise failure

    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(type(failure)) as caught:
        load_model(str(directory), device="cpu", bits=bits)
    assert caught.value is failure


def test_weights_may_need_a_package(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ImportError("Loading a GPTQ quantized model requires optimum (`pip install optimum`)")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    assert _message(directory) == (
        f"{directory}: its weights need a package that is missing: Loading a GPTQ quantized model requires optimum "
        "(`pip install optimum`)"
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_quantisation_needs_its_package(directory: Path, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    assert _message(directory, bits=bits) == (
        f"loading in {bits} bits needs bitsandbytes; run: pip install bitsandbytes"
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_quantisation_is_asked_for_as_transformers_wants_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, bits: Any
) -> None:
    asked: dict[str, Any] = {}

    def refuse(*args: Any, **options: Any) -> None:
        asked.update(options)
        raise RuntimeError("None of the available devices are supported.\nSee the docs.")

    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    message = _message(directory, bits=bits, dtype="bfloat16")
    assert "bitsandbytes cannot quantise it here, it may need a CUDA device: None of the available" in message
    config = asked["quantization_config"]
    assert (config.load_in_4bit, config.load_in_8bit) == (bits == 4, bits == 8)
    if bits == 4:
        assert config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_compute_dtype == torch.bfloat16
    assert asked["device_map"] == {"": torch.device("cpu")}


def test_auto_prefers_cuda_then_mps_then_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda cuda=cuda: int(cuda))
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert resolve_device("auto").type == expected


def test_auto_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("mps")) == torch.float32
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, s=supported: s)
        assert resolve_dtype("auto", torch.device("cuda")) == expected


def test_a_built_in_model_wins_over_a_directory_of_its_name(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    builtin = locate.Builtin("", "", find=lambda: directory, directory=lambda: directory)
    monkeypatch.setitem(locate.BUILTINS, "smollm2", builtin)
    assert load_model("smollm2", device="cpu").name == "smollm2"
    assert "has no config.json" in _message("./smollm2")


def test_a_built_in_model_knows_by_which_name_others_load_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builtin = locate.Builtin("", "", find=lambda: directory, directory=lambda: directory, hub_id="org/known")
    monkeypatch.setitem(locate.BUILTINS, "tiny", builtin)
    model = load_model("tiny", device="cpu").model
    assert model.config._name_or_path == "org/known" and model.name_or_path == str(directory)
    assert load_model(str(directory), device="cpu").model.config._name_or_path == str(directory)
    assert locate.portable_name("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert locate.portable_name("org/model") is None


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, bayeslora.models; print(*({'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == ""


def misread(bits: int) -> bool:
    """Whether this CPU misreads the tiny model's rows of 32 numbers."""
    return bits == 4 and four_bit.reads_rows_wrongly()


@pytest.mark.parametrize("bits, layer", [(4, "Linear4bit"), (8, "Linear8bitLt")])
def test_quantised_for_real(directory: Path, bits: Any, layer: str) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    told = pytest.warns(UserWarning, match="bitsandbytes misreads") if misread(bits) else contextlib.nullcontext()
    with told:
        model = load_model(str(directory), device="cpu", bits=bits).model
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == layer
    assert type(model.lm_head).__name__ == "Linear"
    layers = [m.model.layers[1].mlp.down_proj for m in (model, tiny_model("llama"))]
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, exact = (layer(x) for layer in layers)
    assert 0 < (ours - exact).norm() / exact.norm() < {4: 0.15, 8: 0.02}[bits]
