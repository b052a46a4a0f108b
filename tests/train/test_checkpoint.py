"""Checkpoints: a round trip to the bit, and what happens to files that are wrong, old or half written."""

import json
import math
import struct

import pytest
import torch
from safetensors import SafetensorError, safe_open

from adapter.cases import adapted, tokens
from bayeslora import find_holder
from bayeslora.errors import InputError
from bayeslora.train import checkpoint
from bayeslora.train.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from bayeslora.train.components import ComponentLosses
from bayeslora.train.optimise import parameter_groups


class Trained:
    """A model with an optimiser that has taken steps."""

    def __init__(self, steps=2, posterior="inducing", optimiser=torch.optim.AdamW):
        self.model = adapted(posterior=posterior)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimiser = optimiser(parameter_groups(self.model, 1e-2, 0.1, {}))
        for step in range(steps):
            self.step(step)

    def step(self, seed):
        self.model.train()
        self.model.seed_draws(seed)
        self.optimiser.zero_grad()
        ids = tokens(seed=seed)
        (self.model(ids, labels=ids).loss + 1e-4 * find_holder(self.model).kl().total).backward()
        self.optimiser.step()

    def save(self, path, state=None, run="this"):
        save_checkpoint(path, state or TrainingState(), self.parameters, self.optimiser, run)

    def load(self, path, run="this"):
        return load_checkpoint(path, self.parameters, self.optimiser, run)

    def tensors(self):
        """Copies of everything that training changes."""
        values = {name: p.detach().clone() for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            values |= {f"{key} of {name}": v.clone() for key, v in self.optimiser.state.get(p, {}).items()}
        return values


def assert_identical(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value) and got[name].dtype == value.dtype, name


@pytest.mark.parametrize("posterior", ["inducing", "point"])
@pytest.mark.parametrize("optimiser", [torch.optim.AdamW, torch.optim.SGD])
def test_parameters_and_optimiser_come_back_to_the_bit(tmp_path, posterior, optimiser):
    trained = Trained(2, posterior, optimiser)
    trained.save(tmp_path / "c.safetensors")
    want = trained.tensors()
    fresh = Trained(0, posterior, optimiser)
    fresh.load(tmp_path / "c.safetensors")
    assert_identical(fresh.tensors(), want)
    for one in (trained, fresh):  # and go on to the same place
        one.step(7)
    assert_identical(fresh.tensors(), trained.tensors())


def test_the_first_checkpoint_may_come_before_the_first_step(tmp_path):
    trained = Trained(0)
    trained.save(tmp_path / "c.safetensors")
    fresh = Trained(0)
    fresh.load(tmp_path / "c.safetensors")
    assert_identical(fresh.tensors(), trained.tensors())


def test_the_state_comes_back(tmp_path):
    trained = Trained(1)
    best = {name: torch.randn_like(p) for name, p in trained.parameters.items()}
    state = TrainingState(
        step=17,
        best_nll=1 / 3,
        best=best,
        waited=1,
        stopped=True,
        history=[{"epoch": 1, "step": 9, "train_nll": 0.1 + 0.2, "validation": {"acc": 2 / 3, "nll": 1e-17}}],
        train_nll=(math.pi, 5),
        components=ComponentLosses([0.1, 0.2], [3.0, 4.0], [1.0, 2.0]),
        restarted=[{"epoch": 1, "component": 2, "from": 0, "train_nll": [0.1, 0.2, 0.9]}],
        seconds=12.5,
    )
    trained.save(tmp_path / "c.safetensors", state)
    got = Trained(0).load(tmp_path / "c.safetensors")
    assert_identical(got.best, best)
    assert vars(got) | {"best": None} == vars(state) | {"best": None}
    assert state.best is best  # saving changes nothing


def test_an_empty_state_comes_back(tmp_path):
    trained = Trained(1)
    trained.save(tmp_path / "c.safetensors")
    assert vars(Trained(0).load(tmp_path / "c.safetensors")) == vars(TrainingState())


def test_the_file_is_plain_safetensors(tmp_path):
    trained = Trained(1)
    trained.save(tmp_path / "c.safetensors")
    with safe_open(tmp_path / "c.safetensors", framework="pt") as file:
        names = {name.split(".")[0] for name in file.keys()}  # noqa: SIM118
        assert json.loads(file.metadata()["state"])["step"] == 0
    assert names == {"parameter", "optimiser"}


@pytest.mark.parametrize("run", ["", "that", "this "])
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(tmp_path, run):
    Trained(2).save(tmp_path / "c.safetensors")
    fresh = Trained(0)
    before = fresh.tensors()
    with pytest.raises(InputError, match=r"c\.safetensors: is a checkpoint of another run or version; remove it"):
        fresh.load(tmp_path / "c.safetensors", run)
    assert_identical(fresh.tensors(), before)


def test_a_checkpoint_of_another_version_is_refused(tmp_path, monkeypatch):
    Trained(1).save(tmp_path / "c.safetensors")
    monkeypatch.setattr(checkpoint, "VERSION", checkpoint.VERSION + 1)
    with pytest.raises(InputError, match="another run or version"):
        Trained(0).load(tmp_path / "c.safetensors")


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 0.5, -1])
def test_a_truncated_file_is_refused_and_changes_nothing(tmp_path, kept):
    path = tmp_path / "c.safetensors"
    Trained(1).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    fresh = Trained(0)
    before = fresh.tensors()
    with pytest.raises(InputError, match=r"c\.safetensors: cannot be read .* use --force to begin anew"):
        fresh.load(path)
    assert_identical(fresh.tensors(), before)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    for content in (b"hello", struct.pack("<Q", 2) + b"{}"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"c\.safetensors: "):
            Trained(0).load(path)


@pytest.mark.parametrize("error", [OSError, SafetensorError])
def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch, error):
    trained, path = Trained(1), tmp_path / "c.safetensors"
    trained.save(path, TrainingState(step=1))
    want = trained.tensors()

    def half_written(tensors, file, metadata):
        file.write_bytes(b"half")
        raise error("No space left on device")

    trained.step(3)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", half_written)
        with pytest.raises(OSError, match="No space left"):
            trained.save(path, TrainingState(step=2))
    fresh = Trained(0)
    assert fresh.load(path).step == 1
    assert_identical(fresh.tensors(), want)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_what_a_killed_process_left_behind_does_no_harm(tmp_path):
    trained, path = Trained(1), tmp_path / "c.safetensors"
    (tmp_path / "c.safetensors.partial").write_bytes(b"half")
    trained.save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    fresh = Trained(0)
    fresh.load(path)
    assert_identical(fresh.tensors(), trained.tensors())
