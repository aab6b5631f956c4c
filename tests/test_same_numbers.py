"""Loss, gradients, gradient norm and parameters are those of one device, for both recipes and every layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_tp
from lightning_tp.layout import ParallelLayout
from lightning_tp.testing import RankPool, TrainingRecord, largest_difference, relative, train
from recipes.gpt import GPTModule
from recipes.llama import LlamaModule

STEPS, BATCH, SEQUENCE, VOCAB = 10, 4, 12, 64
LAYERS = 2
TOLERANCE = {"64-true": 1e-10, "32-true": 1e-5}
MODELS: dict[str, Any] = {
    "llama": partial(LlamaModule, hidden_size=32, num_layers=LAYERS, num_heads=8, num_kv_heads=4),
    "llama tied": partial(LlamaModule, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=4, tie_embeddings=True),
    "llama multi-query": partial(LlamaModule, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=1),
    "gpt": partial(GPTModule, hidden_size=32, num_layers=LAYERS, num_heads=4, dropout=0.0, block_size=SEQUENCE),
}


def build(name: str) -> Any:
    # A large epsilon: where a gradient is almost zero, Adam would turn rounding into whole steps.
    optimizer = partial(AdamW, lr=1e-3, eps=1e-5, weight_decay=0.1)
    return MODELS[name](vocab_size=VOCAB, optimizer=optimizer, warmup_steps=2)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (STEPS, BATCH, SEQUENCE + 1), generator=generator)
    return [(entry[:, :-1].contiguous(), entry[:, 1:].contiguous()) for entry in tokens]


def train_on_ranks(name: str, precision: str, tensor_parallel_size: int, data_parallel_size: int) -> TrainingRecord:
    return train(partial(build, name), batches(), precision, tensor_parallel_size, data_parallel_size)


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
@pytest.mark.parametrize("layout", ["tp2", "tp4", "dp2 x tp2"])
@pytest.mark.parametrize("name", list(MODELS))
def test_training_is_the_same_as_on_one_device(
    ranks2: RankPool, ranks4: RankPool, name: str, layout: str, precision: str
) -> None:
    pool, sizes = {"tp2": (ranks2, (2, 1)), "tp4": (ranks4, (4, 1)), "dp2 x tp2": (ranks4, (2, 2))}[layout]
    expected = train(partial(build, name), batches(), precision)
    assert len(expected.losses) == len(expected.grads) == STEPS
    for record in pool.run(train_on_ranks, name, precision, *sizes):
        differences = largest_difference(record, expected)
        assert max(differences.values()) < TOLERANCE[precision], differences


class Collectives(TorchDispatchMode):
    """Every collective, by operator and number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls.append((func._schema.name, sum(tensor.numel() for tensor in args[0])))
        return func(*args, **(kwargs or {}))


def step_on_ranks(
    name: str,
) -> tuple[list[tuple[str, int]], list[tuple[str, int]], int, dict[str, tuple[int, int]]]:
    """Collectives of one forward and one backward, those planned, and bytes (rank, whole) of split parameters."""
    layout = ParallelLayout(1, dist.get_world_size())
    torch.manual_seed(0)
    module = build(name)
    inputs, targets = batches()[0]
    plan = lightning_tp.find_plan(module, inputs, layout.tensor_parallel_size)
    lightning_tp.parallelize(module, layout.device_mesh("cpu"), plan)
    with Collectives() as forward:
        loss = torch.nn.functional.cross_entropy(module(inputs).flatten(0, 1), targets.flatten())
    with Collectives() as backward:
        loss.backward()
    sizes = {
        parameter_name: (p.to_local().nbytes, p.numel() * p.element_size())
        for parameter_name, p in module.named_parameters()
        if isinstance(p, DTensor) and not p.placements[0].is_replicate()
    }
    return forward.calls, backward.calls, plan.all_reduces_per_step, sizes


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_costs_two_all_reduces_forward_and_two_backward(
    ranks2: RankPool, ranks4: RankPool, name: str, size: int
) -> None:
    hidden = BATCH * SEQUENCE * 32
    for forward, backward, planned, _ in (ranks2 if size == 2 else ranks4).run(step_on_ranks, name):
        assert forward == backward == [("c10d::allreduce_", hidden)] * 2 * LAYERS
        assert planned == 4 * LAYERS


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_exactly_its_share_of_what_is_split(
    ranks2: RankPool, ranks4: RankPool, name: str, size: int
) -> None:
    for _, _, _, sizes in (ranks2 if size == 2 else ranks4).run(step_on_ranks, name):
        assert len(sizes) == LAYERS * {"llama": 7, "gpt": 6}[name]  # gpt: two biases of columns a layer
        for local, total in sizes.values():
            assert local * size == total


def broken_on_ranks(name: str, fault: str) -> TrainingRecord:
    """Train with one thing wrong in the engine or the plan."""
    from lightning_tp.parallel import apply, linear

    if fault == "bias on every rank":

        class Broken(linear.RowParallel):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                role = self._parallel.role
                bias: Any = self.bias
                return linear.reduce(role.adapter.product(x, self.weight) + bias, role.group)

        replaced: tuple[Any, str, Any] = (apply, "RowParallel", Broken)
    elif fault == "no all-reduce of input gradients":
        replaced = (linear, "copy", lambda x, group: x)
    else:
        original = apply.LocalRead
        replaced = (apply, "LocalRead", lambda group, partial, rows, counts: original(group, False, rows, counts))
    owner, attribute, value = replaced
    kept = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        return train_on_ranks(name, "64-true", 2, 1)
    finally:
        setattr(owner, attribute, kept)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gpt", "bias on every rank"),
        ("gpt", "no all-reduce of input gradients"),
        ("llama", "no all-reduce of input gradients"),
        ("llama multi-query", "no all-reduce of shared weights"),
    ],
)
def test_a_fault_of_the_engine_shows_in_the_numbers(ranks2: RankPool, name: str, fault: str) -> None:
    expected = train(partial(build, name), batches(), "64-true")
    for record in ranks2.run(broken_on_ranks, name, fault):
        assert max(largest_difference(record, expected).values()) > 1e-4


def evaluated_on_ranks(name: str) -> torch.Tensor:
    """Logits under ``inference_mode``, in which runs on NCCL are evaluated, and a training step after it."""
    layout = ParallelLayout(1, dist.get_world_size())
    torch.manual_seed(0)
    module, inputs = build(name), batches()[0][0]
    plan = lightning_tp.find_plan(module, inputs, layout.tensor_parallel_size)
    lightning_tp.parallelize(module, layout.device_mesh("cpu"), plan)
    with torch.inference_mode():
        inferred = module.eval()(inputs)
    module.train()(inputs).sum().backward()
    return inferred.clone()


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_evaluation_in_inference_mode_is_the_same(ranks4: RankPool, name: str) -> None:
    torch.manual_seed(0)
    module = build(name).eval()
    with torch.no_grad():
        expected = module(batches()[0][0])
    for found in ranks4.run(evaluated_on_ranks, name):
        assert relative(found, expected) < 1e-5


class InferenceModes(pl.Callback):
    def __init__(self) -> None:
        self.modes: list[bool] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        self.modes = [loop.inference_mode for loop in loops]


def inference_modes_on_ranks(tensor_parallel_size: int, data_parallel_size: int) -> list[bool]:
    seen = InferenceModes()
    train(partial(build, "llama"), batches()[:1], "32-true", tensor_parallel_size, data_parallel_size, (seen,))
    return seen.modes


def test_sharded_data_parallel_models_are_evaluated_without_inference_mode(ranks4: RankPool) -> None:
    assert ranks4.run(inference_modes_on_ranks, 2, 2) == [[False] * 3] * 4
    assert ranks4.run(inference_modes_on_ranks, 4, 1) == [[True] * 3] * 4
