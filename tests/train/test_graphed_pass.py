"""Passes as CUDA graphs: when they are used, batches that share a shape, and, where there is a GPU, the numbers."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.adapter.cases import adapted

from bayeslora.adapter.holder import find_holder
from bayeslora.tasks import EncodedText
from bayeslora.train import graphed_pass as graphed_pass_module
from bayeslora.train.graphed_pass import EAGER, GraphedPass, graphed_pass
from bayeslora.train.head_loss import find_sliceable_head
from bayeslora.train.objective import TokenObjective, batch_lessons

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def texts(*lengths, seed=0):
    """One text of each length, with a prompt of one to three tokens."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(1, 60, size=length).tolist() for length in lengths]
    return [EncodedText(f"t{k}", own[: 1 + k % 3], own[1 + k % 3 :]) for k, own in enumerate(ids)]


def counted_targets(lessons):
    """The targets that count, with their positions."""
    used = lessons.weights > 0
    where = lessons.counted[used]
    return list(zip(where.tolist(), lessons.targets.flatten()[where].tolist(), strict=True))


@pytest.mark.parametrize("lengths", [(9, 5, 7, 9), (33, 4), (34, 30), (2,), (65, 3, 3, 3)])
def test_batches_of_many_lengths_have_few_shapes_and_the_same_targets(lengths):
    own, alike = batch_lessons(texts(*lengths), 0), batch_lessons(texts(*lengths), 0, alike=32)
    rows, width = alike.input_ids.shape
    assert width % 32 == 0 and own.input_ids.shape[1] == max(lengths) - 1 > width - 32
    assert torch.equal(alike.input_ids[:, : own.input_ids.shape[1]], own.input_ids)
    assert len(alike.counted) * 4 % (rows * width) == 0
    assert len(alike.counted) - len(own.counted) < rows * width / 4
    assert len(alike.weights) == len(alike.counted) and own.weights.all()
    moved = [(place // width * (max(lengths) - 1) + place % width, token) for place, token in counted_targets(alike)]
    assert moved == counted_targets(own)


def test_a_text_without_a_target_fills_nothing():
    lessons = batch_lessons([EncodedText("t", [], [5])], 0, alike=32)
    assert lessons.input_ids.shape == (1, 0) and len(lessons.counted) == 0


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("sliced", [False, True])
def test_what_fills_a_batch_changes_neither_losses_nor_gradients(monkeypatch, draws, sliced):
    found = []
    for alike in (1, 32):
        model = adapted(posterior="meanfield").train()
        holder = find_holder(model)
        objective = TokenObjective(model, head=find_sliceable_head(model) if sliced else None)
        with holder.restoring():
            holder.draw(draws, torch.Generator().manual_seed(0))
            losses = objective._losses_of_rows(*batch_lessons(texts(9, 5, 7, 8), 0, alike))
            losses.sum().backward()
        found.append([losses.detach(), *(p.grad for p in holder.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 1
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_on_a_cpu_there_are_no_graphs():
    assert graphed_pass(adapted(posterior="meanfield")) is None


def test_draws_that_are_replayed_count_as_used():
    """The KL is that of the draws in use, as after a forward pass."""
    model = adapted(posterior="inducing").train()
    holder = find_holder(model)
    holder.draw(2, torch.Generator().manual_seed(3))
    used = holder.factors_in_use()
    assert list(used) == ["default"] and used["default"].n == 2
    got = holder.kl()
    model(torch.ones(2, 3, dtype=torch.long))
    assert torch.equal(got.total, holder.kl().total)


class ByHand(graphed_pass_module._Graph):
    """Graphs for a CPU: a replay computes again, from and into the memory that was there at the capture."""

    def __init__(self, compute, batch, holder, factors, other):
        self.holder = holder
        super().__init__(compute, batch, holder, factors, other)

    def _capture(self, losses, other):
        found = losses()
        self.slopes, self.losses = torch.zeros_like(found), found.detach().clone()
        self.gradients = [torch.zeros_like(stack) for stack in self._wanted]
        self.kept = None

        def forward():
            drawn = dict(self.holder._drawn)
            with torch.enable_grad(), self.holder.restoring():
                self.kept = losses()
            self.holder._drawn.update(drawn)  # a graph that is replayed calls no layer
            self.losses.copy_(self.kept.detach())

        def backward():
            for kept, gradient in zip(self.gradients, self._differentiate(self.kept), strict=True):
                kept.copy_(gradient)

        self.forward, self.backward = SimpleNamespace(replay=forward), SimpleNamespace(replay=backward)


def trained(graphs, batches, posterior="decoupled", draws=2, dropout=0.0, parts=1, device="cpu"):
    """Losses and gradients of steps on these batches; a step may be divided into parts."""
    model = adapted(posterior=posterior, lora_dropout=dropout, target_modules=["q_proj", "o_proj"]).to(device).train()
    holder = find_holder(model)
    objective = TokenObjective(model, head=find_sliceable_head(model))
    if device == "cpu" or not graphs:
        objective.__dict__["_graphs"] = GraphedPass(model, holder) if graphs else None
    optimiser = torch.optim.SGD(holder.parameters(), lr=1e-2)
    found = []
    with holder.restoring():
        for step, batch in enumerate(batches):
            optimiser.zero_grad()
            for part in range(parts):
                torch.manual_seed(100 * step + part)
                holder.draw(draws, torch.Generator().manual_seed(10 * step + part))
                losses = objective.losses(batch, draws)
                (losses.sum() / 100 + 0.01 * holder.kl().total).backward()
                found.append(losses.detach().cpu())
            found += [p.grad.cpu() for p in holder.parameters() if p.grad is not None]
            optimiser.step()
    return found, objective._graphs


def assert_alike(found, wanted):
    assert len(found) == len(wanted) > 0
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * max(1e-3, float(want.abs().max())))


@pytest.fixture
def by_hand(monkeypatch):
    monkeypatch.setattr(graphed_pass_module, "_Graph", ByHand)


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("posterior", ["decoupled", "inducing", "meanfield", "point"])
@pytest.mark.parametrize("parts", [1, 3])
def test_what_a_replay_reads_and_writes_is_what_a_step_needs(posterior, parts):
    """Batch and draw go in, losses and gradients come out and are not overwritten by the next replay; shapes come in turn."""
    lengths = [(9, 5, 7, 8), (50, 40, 7, 8)]
    batches = [texts(*lengths[k % 2], seed=k) for k in range(2 * EAGER + 4)]
    found, graphs = trained(True, batches, posterior, parts=parts)
    assert len(graphs.graphs) == 2 and graphs.usable
    assert_alike(found, trained(False, batches, posterior, parts=parts)[0])


@pytest.mark.usefixtures("by_hand")
def test_gradients_are_not_those_of_the_next_replay():
    """Torch keeps the first gradient of a leaf as it is given."""
    model = adapted(posterior="point", target_modules=["q_proj"]).train()
    holder = find_holder(model)
    leaves = holder.posterior("default").mean().detach()
    wanted = [stack.requires_grad_() for stack in (*leaves.A, *leaves.B)]
    batches = [torch.randint(0, 60, (2, 8), generator=torch.Generator().manual_seed(k)) for k in range(2)]

    def losses(ids):
        return model(ids).logits.log_softmax(-1)[..., 0].sum(1)

    found = []
    for compute in (losses, functools.partial(GraphedPass(model, holder), losses)):
        with holder.restoring():
            holder.use({"default": leaves})
            for ids in (*[batches[0]] * (EAGER + 1), *batches):
                if ids is batches[1]:
                    first = [stack.grad for stack in wanted]
                    kept = [it.clone() for it in first]
                else:
                    for stack in wanted:
                        stack.grad = None
                compute(ids).sum().backward()
        found.append([stack.grad - one for stack, one in zip(wanted, kept, strict=True)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("late", [True, False])
def test_a_gradient_that_is_no_longer_there_is_refused(late):
    """That of a pass before the last, or a second time."""
    model = adapted(posterior="point", target_modules=["q_proj"]).train()
    holder = find_holder(model)
    graphs = GraphedPass(model, holder)
    ids = torch.ones(2, 8, dtype=torch.long)
    with holder.restoring():
        for _ in range(EAGER + 1):
            holder.draw(1, torch.Generator().manual_seed(0))
            first = graphs(lambda ids: model(ids).logits.sum((1, 2)), ids).sum()
        assert len(graphs.graphs) == 1
        if late:
            graphs(lambda ids: model(ids).logits.sum((1, 2)), ids).sum().backward()
        else:
            first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="take it once, before the next pass"):
        first.backward()


@pytest.mark.usefixtures("by_hand")
def test_weights_that_moved_need_a_new_graph():
    model = adapted(posterior="point", target_modules=["q_proj"]).train()
    holder, graphs = find_holder(model), GraphedPass(model, find_holder(model))
    ids = torch.ones(2, 8, dtype=torch.long)

    def pass_over():
        with holder.restoring():
            holder.draw(1, torch.Generator().manual_seed(0))
            return graphs(lambda ids: model(ids).logits.sum((1, 2)), ids)

    for _ in range(EAGER + 2):
        pass_over()
    assert len(graphs.graphs) == 1
    norm = model.base_model.model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 2, requires_grad=False)
    with torch.no_grad(), holder.restoring():
        holder.draw(1, torch.Generator().manual_seed(0))
        want = model(ids).logits.sum((1, 2))
    for _ in range(EAGER + 2):
        torch.testing.assert_close(pass_over().detach(), want)
    assert len(graphs.graphs) == 2


def test_a_pass_that_cannot_be_captured_runs_without_graphs(monkeypatch):
    def refuse(*given):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphed_pass_module, "_Graph", refuse)
    batches = [texts(9, 5, 7, 8, seed=k) for k in range(EAGER + 2)]
    found, graphs = trained(True, batches)
    assert not graphs.usable and not graphs.graphs
    assert_alike(found, trained(False, batches)[0])


# On a GPU -------------------------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("posterior", ["decoupled", "inducing", "meanfield", "point"])
def test_replayed_steps_are_those_without_graphs(posterior):
    """Two shapes in turn, whose graphs share their memory."""
    lengths = [(9, 5, 7, 8), (50, 40, 7, 8), (12, 30, 7, 8), (60, 40, 9, 8)]
    batches = [texts(*lengths[k % 4], seed=k) for k in range(4 * EAGER + 4)]
    found, graphs = trained(True, batches, posterior, device="cuda")
    assert graphs.usable and len(graphs.graphs) > 1
    assert_alike(found, trained(False, batches, posterior, device="cuda")[0])


@needs_gpu
@pytest.mark.parametrize("posterior", ["decoupled", "point"])
def test_gradients_of_replayed_parts_add_up(posterior):
    batches = [texts(9, 5, 7, 8, seed=k) for k in range(5)]
    found, graphs = trained(True, batches, posterior, parts=3, device="cuda")
    assert len(graphs.graphs) == 1
    assert_alike(found, trained(False, batches, posterior, parts=3, device="cuda")[0])


@needs_gpu
def test_replayed_dropout_is_that_of_the_seed(monkeypatch):
    """Against steps on the same batches, which are padded where graphs are used: a mask depends on the shape."""
    batches = [texts(9, 5, 7, 8, seed=k) for k in range(6)]
    found, graphs = trained(True, batches, dropout=0.5, device="cuda")
    assert len(graphs.graphs) == 1
    monkeypatch.setattr(graphed_pass_module, "EAGER", len(batches))
    wanted, none = trained(True, batches, dropout=0.5, device="cuda")
    assert not none.graphs
    assert_alike(found, wanted)


@needs_gpu
def test_graphs_of_many_shapes_take_the_memory_of_few_passes():
    widths = [448, 128, 512, 256, 64, 384, 192, 320]
    batches = {width: texts(*[width] * 64) for width in widths}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trained(False, [batches[max(widths)]], device="cuda")
    one_pass = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    _, graphs = trained(True, [batches[width] for width in widths for _ in range(EAGER + 2)], device="cuda")
    assert len(graphs.graphs) == len(widths)
    assert torch.cuda.memory_reserved() < 4 * one_pass


@needs_gpu
def test_where_activations_are_recomputed_or_more_is_trained_there_are_no_graphs():
    model = adapted(posterior="meanfield").cuda()
    assert graphed_pass(model) is not None
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert graphed_pass(model) is None
    model = adapted(posterior="meanfield").cuda()
    model.get_input_embeddings().weight.requires_grad_()
    assert graphed_pass(model) is None


@needs_gpu
def test_where_a_pass_cannot_be_captured_training_goes_on():
    model = adapted(posterior="meanfield").cuda().train()
    holder, graphs = find_holder(model), graphed_pass(model)
    ids = torch.ones(2, 8, dtype=torch.long, device="cuda")

    def compute(ids):
        logits = model(ids).logits
        return logits.sum((1, 2)) * float(logits.sum() > 1e9)  # the host waits

    with holder.restoring():
        for seed in range(EAGER + 3):
            holder.draw(2, torch.Generator().manual_seed(seed))
            graphs(compute, ids).sum().backward()
    assert not graphs.usable and not graphs.graphs
