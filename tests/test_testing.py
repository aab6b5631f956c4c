"""The comparison with one device passes where numbers agree, and fails where anything is wrong."""

from __future__ import annotations

import multiprocessing
import sys
from functools import partial
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tp import ParallelConfigError
from lightning_tp.testing import RankError, RankPool, assert_same_as_one_device
from recipes.llama import LlamaModule

WIDTH = 8


class Network(nn.Module):
    """One parameter is never used; nothing is random but dropout."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.up, self.down, self.unused = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.down(self.dropout(F.gelu(self.up(x))))
        parallel = dist.is_initialized() and type(self.up) is not nn.Linear
        if self.fault == "scaled on the last rank" and parallel and dist.get_rank() == dist.get_world_size() - 1:
            y = y * 1.001
        if self.fault == "no gradient on ranks" and parallel:
            y = y + self.unused(x[..., :2]).sum()
        if self.fault == "raises" and parallel:
            raise RuntimeError("it broke here")
        return {"y": y, "index": torch.arange(3)}


class Attention(nn.Module):
    """Two layers whose key biases have no effect: their gradients are zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value", "out")})
            for _ in range(2)
        )
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = (layer[name](x).unflatten(-1, (4, -1)).transpose(1, 2) for name in ("query", "key", "value"))
            y = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)
            x = x + layer["out"](y)
        return x


class Normed(nn.Module):
    """With a fault, the gradient of the norm, which every rank has whole, is wrong on the second rank only."""

    def __init__(self, fault: bool = False) -> None:
        super().__init__()
        self.fault = fault
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.fault and type(self.up) is not nn.Linear and dist.get_rank() == 1:
            x.register_hook(lambda gradient: gradient * 1.01)
        return self.down(F.gelu(self.up(x)))


class Holder(pl.LightningModule):
    """A LightningModule that calls its module what the wrapper of plain modules calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.weight = Normed(), nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.module(batch[0]) * self.weight).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batch() -> tuple[Tensor]:
    return (torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)


def odd() -> tuple[Tensor]:
    return (torch.zeros(3, WIDTH),)


def tokens() -> Any:
    ids = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def from_the_common_stream() -> Tensor:
    return torch.randn(4, 3, WIDTH)


def encoded() -> Any:
    from transformers import BatchEncoding

    ids = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
    return BatchEncoding({"input_ids": ids, "labels": ids})


def hugging_face_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def own_loss_of_half_the_batch(output: Any, batch: Any) -> Tensor:
    assert batch["input_ids"].shape[0] == (2 if dist.is_initialized() else 4)
    return output.loss


def llama() -> LlamaModule:
    return LlamaModule(vocab_size=32, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2)


def mean_square(output: Any, batch: Any) -> Tensor:
    return output.square().mean()


def squared(output: Any, batch: Any) -> Tensor:
    return output["y"].square().mean()


def test_a_plain_module_agrees(ranks2: RankPool) -> None:
    comparison = assert_same_as_one_device(Network, batch, 2, pool=ranks2)
    assert comparison.plan.split_share > 0.9
    assert comparison.planning_seconds > 0
    split = 16 * WIDTH + 16 + WIDTH * 16  # both weights and the bias of the column
    assert comparison.total_parameters == split + WIDTH + 6
    assert comparison.parameters_per_rank == (split // 2 + WIDTH + 6,) * 2
    assert comparison.zero_gradients == {}
    assert len(comparison.one_device.losses) == 3
    assert comparison.largest < 1e-12
    assert comparison.one_device.losses[0] > comparison.one_device.losses[-1]
    assert set(comparison.one_device.parameters) == set(dict(Network().named_parameters()))


@pytest.mark.parametrize("layout", [4, (2, 2)])
def test_a_lightning_module_agrees_under_other_layouts(ranks4: RankPool, layout: Any) -> None:
    comparison = assert_same_as_one_device(llama, tokens, layout, pool=ranks4, steps=2)
    assert comparison.plan.tensor_parallel_size == (4 if layout == 4 else 2)


def test_a_transformers_model_is_trained_on_its_own_loss(ranks2: RankPool) -> None:
    # Its norms and its loss round to float32, whatever the precision.
    comparison = assert_same_as_one_device(hugging_face_llama, encoded, 2, pool=ranks2, tolerance=1e-5)
    assert comparison.plan.split_share > 0.5
    assert comparison.one_device.losses[0] == pytest.approx(torch.tensor(32.0).log().item(), rel=0.05)


def test_every_kind_of_batch_is_split_over_data_parallel_ranks(ranks4: RankPool) -> None:
    arguments: Any = (hugging_face_llama, encoded, (2, 2))
    assert_same_as_one_device(*arguments, loss=own_loss_of_half_the_batch, pool=ranks4, tolerance=1e-5)


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
def test_gradients_that_are_zero_but_for_rounding_are_listed(ranks2: RankPool, precision: Any) -> None:
    adamw = partial(torch.optim.AdamW, lr=1e-3)  # with its own epsilon, which lets rounding decide steps
    comparison = assert_same_as_one_device(
        Attention, from_the_common_stream, 2, pool=ranks2, optimizer=adamw, loss=mean_square, precision=precision
    )
    assert comparison.zero_gradients == {"layers.0.key.bias": WIDTH, "layers.1.key.bias": WIDTH}


def test_a_batch_from_the_common_random_stream_is_the_same_everywhere(ranks2: RankPool) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert_same_as_one_device(Normed, from_the_common_stream, 2, pool=ranks2, steps=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_names_are_those_of_the_module(ranks2: RankPool) -> None:
    comparison = assert_same_as_one_device(Holder, batch, 2, pool=ranks2, steps=1)
    assert set(comparison.one_device.parameters) == set(dict(Holder().named_parameters()))


def test_ranks_are_started_and_ended_without_a_pool() -> None:
    before, threads = multiprocessing.active_children(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)  # the comparison runs with one, and leaves what it found
    try:
        assert_same_as_one_device(Normed, batch, steps=1)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert set(multiprocessing.active_children()) <= set(before)


def test_own_loss_and_optimizer(ranks2: RankPool) -> None:
    sgd = partial(torch.optim.SGD, lr=0.5)
    comparison = assert_same_as_one_device(Network, batch, 2, pool=ranks2, loss=squared, optimizer=sgd)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        expected = squared(Network().eval()(*batch()), None).item()
    finally:
        torch.set_default_dtype(torch.float32)
    assert comparison.one_device.losses[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("scaled on the last rank", r"other numbers than one device, beyond 1e-10:\n(.|\n)*gradient (up|down)"),
        ("no gradient on ranks", r"In step 1 only one of the runs has gradients of unused\.(bias|weight)"),
    ],
)
def test_a_fault_fails_and_is_named(ranks2: RankPool, fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_as_one_device(partial(Network, fault), batch, 2, pool=ranks2)


def test_a_fault_that_one_rank_has_alone_is_named_with_the_rank(ranks2: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"gradient norm\.(weight|bias) \(step 1\): .* rank 1 "):
        assert_same_as_one_device(partial(Normed, True), batch, 2, pool=ranks2, steps=1)


def test_an_error_on_a_rank_is_shown(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match="it broke here"):
        assert_same_as_one_device(partial(Network, "raises"), batch, 2, pool=ranks2)


def test_what_cannot_be_sent_to_ranks_is_refused(ranks2: RankPool) -> None:
    with pytest.raises(ParallelConfigError, match="functions that the ranks can import"):
        assert_same_as_one_device(lambda: Network(), batch, 2, pool=ranks2)
    only_here = ModuleType("only_here")
    exec("def factory(): raise RuntimeError('it was called')", only_here.__dict__)
    sys.modules["only_here"] = only_here
    try:
        with pytest.raises(ParallelConfigError, match=r"ranks cannot import the factories(.|\n)*only_here"):
            assert_same_as_one_device(only_here.factory, batch, 2, pool=ranks2)
    finally:
        del sys.modules["only_here"]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Network, batch, 4), {}, "The layout has 4 ranks, the pool has 2"),
        ((Network, batch, 1), {}, "1 x 1 is no parallel one"),
        ((Network, batch, (0, 2)), {}, "0 x 2 is no parallel one"),
        ((Network, batch, 2), {"precision": "16-true"}, "precision must be one of 64-true, 32-true"),
        ((Network, batch, 2), {"steps": 0}, "steps must be at least 1"),
        ((Network, odd, (2, 1)), {}, r"shape \(3, 8\), and dim 0 cannot be split evenly over 2"),
        ((llama, tokens, 2), {"loss": squared}, "LlamaModule is a LightningModule, which is trained with its own loss"),
    ],
)
def test_arguments_that_are_not_legal_are_refused(
    ranks2: RankPool, arguments: Any, options: dict[str, Any], message: str
) -> None:
    pool = None if "parallel" in message else ranks2
    with pytest.raises(ParallelConfigError, match=message):
        assert_same_as_one_device(*arguments, pool=pool, **options)
