"""The local tensor of a parameter, and gradients through it: those of ``to_local``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_tp.parallel.local_read import local_read
from lightning_tp.testing import RankPool

PLACEMENTS = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)]


def _parameter(placement: object) -> nn.Parameter:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return nn.Parameter(distribute_tensor(torch.randn(8, 6, dtype=torch.float64), mesh, [placement]))


def _check_gradients(placement: object) -> None:
    for product in (lambda w: w.cos().sum(), lambda w: (w.t().contiguous() @ w.cos()).sum()):
        found, expected = _parameter(placement), _parameter(placement)
        product(local_read(found)).backward()
        product(expected.to_local()).backward()
        assert isinstance(found.grad, DTensor) and found.grad.placements == expected.grad.placements
        assert (found.grad.shape, found.grad.stride()) == (found.shape, found.stride())
        assert found.grad.to_local().stride() == found.to_local().stride()
        assert torch.equal(found.grad.to_local(), expected.grad.to_local())
        product(local_read(found)).backward()
        assert torch.equal(found.grad.to_local(), 2 * expected.grad.to_local())


def _check_transposed_gradient(placement: object) -> None:
    """A product that hands back a gradient in another order of memory: the optimizer goes by memory."""
    parameter, plain = _parameter(placement), nn.Parameter(_parameter(placement).to_local().clone())
    for tensor in (local_read(parameter), plain):
        _Transposing.apply(tensor).sum().backward()
    optimizers = [torch.optim.AdamW([tensor], lr=0.1, fused=True) for tensor in (parameter, plain)]
    for optimizer in optimizers:
        optimizer.step()
    assert parameter.grad.to_local().is_contiguous()
    assert torch.equal(parameter.to_local(), plain)


class _Transposing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        rows, columns = grad.shape
        return torch.arange(grad.numel(), dtype=grad.dtype).view(columns, rows).t()


def _check_second_derivative(placement: object) -> None:
    parameter = _parameter(placement)
    (first,) = torch.autograd.grad(local_read(parameter).sin().sum(), parameter, create_graph=True)
    first.to_local().square().sum().backward()
    value = parameter.to_local().detach()
    assert torch.allclose(parameter.grad.to_local(), -2 * value.cos() * value.sin(), rtol=1e-12)


@pytest.mark.parametrize("check", [_check_gradients, _check_transposed_gradient, _check_second_derivative])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_gradients_are_those_of_to_local(check: object, placement: object, ranks2: RankPool) -> None:
    ranks2.run(check, placement)


def _check_without_gradients() -> None:
    parameter = _parameter(Shard(0))
    with torch.no_grad():
        assert not local_read(parameter).requires_grad
    with torch.inference_mode():
        assert torch.equal(local_read(parameter), parameter.to_local())
    frozen = _parameter(Shard(0)).requires_grad_(False)
    assert not local_read(frozen).requires_grad
    plain = nn.Parameter(torch.ones(3))
    assert local_read(plain) is plain
    (local_read(parameter) * 0).sum().backward()
    assert parameter.grad is not None
    (unused,) = torch.autograd.grad(torch.ones(1, requires_grad=True).sum(), parameter, allow_unused=True)
    assert unused is None


def test_what_needs_no_gradient_has_none(ranks2: RankPool) -> None:
    ranks2.run(_check_without_gradients)
