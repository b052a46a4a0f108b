"""The batched flow: identity at the start, triangular Jacobian, log-determinant, and zuko as a reference."""

import pytest
import torch
import zuko
from torch.nn.functional import softplus

from bayeslora.posterior.flow import MIN_SLOPE, FlowParameters, apply_flow, init_flow

FLOWS = 3
SIZES = [(2, 4), (5, 16), (9, 16), (7, 3)]  # columns, hidden units


def fresh(columns, hidden, depth, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def uniform(shape, bound):
        return bound * (2 * torch.rand(shape, generator=generator) - 1)

    flow = init_flow(FLOWS, columns, depth, hidden, uniform)
    return FlowParameters(*(tensor.double() for tensor in flow))


def trained(columns, hidden, depth, seed=0):
    """Parameters far from the identity."""
    generator = torch.Generator().manual_seed(seed + 100)
    return FlowParameters(
        *(
            tensor + 0.25 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            for tensor in fresh(columns, hidden, depth, seed)
        )
    )


def inputs(columns, rows=4, seed=7):
    return torch.randn(FLOWS, rows, columns, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("columns, hidden", [*SIZES, (1, 4)])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_identity_at_the_start(columns, hidden, depth):
    x = inputs(columns)
    y, log_det = apply_flow(fresh(columns, hidden, depth), x)
    torch.testing.assert_close(y, x, atol=1e-7, rtol=0)
    torch.testing.assert_close(log_det, torch.zeros_like(log_det), atol=1e-6, rtol=0)


@pytest.mark.parametrize("columns, hidden", [*SIZES, (1, 4)])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_log_determinant_against_autograd(columns, hidden, depth):
    flow = trained(columns, hidden, depth)
    x = inputs(columns)
    _, log_det = apply_flow(flow, x)
    for k in range(FLOWS):
        single = FlowParameters(*(tensor[k : k + 1] for tensor in flow))
        for row in range(x.shape[1]):
            jacobian = torch.autograd.functional.jacobian(
                lambda v, single=single: apply_flow(single, v.view(1, 1, -1))[0].flatten(), x[k, row]
            )
            if depth == 1:
                torch.testing.assert_close(jacobian, jacobian.tril())
            torch.testing.assert_close(log_det[k, row], torch.linalg.slogdet(jacobian).logabsdet)


def zuko_layer(flow, index, columns, hidden):
    """The same flow layer in zuko, weights copied; zuko interleaves slope and shift of a column."""

    def univariate(slope, shift):
        return torch.distributions.AffineTransform(shift, softplus(slope) + MIN_SLOPE)

    transform = zuko.flows.MaskedAutoregressiveTransform(
        features=columns, univariate=univariate, hidden_features=[hidden, hidden], residual=True
    ).double()
    linears = [m for m in transform.hyper.modules() if isinstance(m, zuko.nn.MaskedLinear)]
    interleaved = torch.stack([torch.arange(columns), torch.arange(columns) + columns], dim=1).flatten()
    weights = [flow.in_weight, *flow.block_weight.unbind(2), flow.out_weight[..., interleaved]]
    biases = [flow.in_bias, *flow.block_bias.unbind(2), flow.out_bias[..., interleaved]]
    with torch.no_grad():
        for linear, weight, bias in zip(linears, weights, biases, strict=True):
            linear.weight.copy_(weight[index, 0].T)
            linear.bias.copy_(bias[index, 0, 0])
    return transform()


def test_two_layers_let_every_column_depend_on_every_other():
    flow = trained(4, 16, depth=2)
    single = FlowParameters(*(tensor[:1] for tensor in flow))
    jacobian = torch.autograd.functional.jacobian(
        lambda v: apply_flow(single, v.view(1, 1, -1))[0].flatten(), inputs(4)[0, 0]
    )
    assert jacobian.abs().min() > 0


@pytest.mark.parametrize("columns, hidden", SIZES)
@pytest.mark.parametrize("seed", [0, 1])
def test_against_zuko_with_the_same_weights(columns, hidden, seed):
    flow = trained(columns, hidden, depth=1, seed=seed)
    x = inputs(columns, rows=6)
    y, log_det = apply_flow(flow, x)
    for k in range(FLOWS):
        want_y, want_log_det = zuko_layer(flow, k, columns, hidden).call_and_ladj(x[k])
        torch.testing.assert_close(y[k], want_y)
        torch.testing.assert_close(log_det[k], want_log_det)


def test_masks_made_in_inference_mode_still_train():
    flow = FlowParameters(*(t.float().requires_grad_() for t in fresh(6, 11, 1)))
    x = inputs(6).float()
    with torch.inference_mode():
        apply_flow(flow, x)
    apply_flow(flow, x)[0].sum().backward()
    assert flow.out_weight.grad.abs().sum() > 0
