"""Models that are bad input or unusual: split with the same numbers, left whole for a reason that names the cause, or
refused with one clear error."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import lightning_tp
from lightning_tp import ParallelConfigError, PlanError
from lightning_tp.layout import ParallelLayout
from lightning_tp.plan.graph import tensors_in
from lightning_tp.testing import RankError, RankPool, relative, whole

WIDTH, HIDDEN, HEADS = 8, 16, 2
Build = Callable[[], nn.Module]

TIED, ELSEWHERE, RETURNED, PYTHON = "tied to", "also used elsewhere", "returned whole", "number of Python"
NOT_CALLED, NO_PARAMETER, TRANSFORM = "not called when", "is no parameter", "function transform"


class Block(nn.Module):
    """Two linears, other modules, and any code as its forward."""

    def __init__(self, code: Callable[[Any, Tensor], Any], **others: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        for name, module in others.items():
            self.add_module(name, module)
        self.code = code

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def feed_forward(between: Callable[[Tensor], Tensor] = F.gelu) -> Block:
    return Block(lambda self, x: self.down(between(self.up(x))))


def on_hidden(code: Callable[[Any, Tensor], Any], **others: nn.Module) -> Build:
    """A block that runs ``code`` on what lies between its column and its row."""
    return lambda: Block(lambda self, x: code(self, F.gelu(self.up(x))), **others)


def on_output(code: Callable[[Any, Tensor], Any]) -> Build:
    """A module whose code sees what a feed-forward inside it gives."""
    return lambda: Block(
        lambda self, x: code(self.inner, self.inner(self.norm(x))), inner=feed_forward(), norm=nn.LayerNorm(WIDTH)
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(), feed_forward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x.float() if self.norms[0].weight.dtype == torch.float32 else x).to(x))
        return x + self.mlp(self.norms[1](x.float() if self.norms[1].weight.dtype == torch.float32 else x).to(x))


class CoreRecomputed(nn.Module):
    """Attention that keeps nothing of its core: that code runs again when its module's call is over."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.heads, self.reentrant = HEADS, reentrant
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.view(*t.shape[:2], self.heads, WIDTH // HEADS).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(checkpoint(self.core, self.q(x), self.k(x), self.v(x), use_reentrant=self.reentrant))


LAYER = {*(f"attention.{name}" for name in "qkvo"), "mlp.up", "mlp.down"}
PAIR = {"up", "down"}


class Named(NamedTuple):
    y: Tensor
    nothing: None


@dataclass
class Held:
    values: list[dict[str, Tensor]]


class Halved(torch.autograd.Function):
    """A ReLU with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x > 0) * 0.5


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(feed_forward() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).max(-1)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (index,) = torch.where(chosen == number)
            y = y.index_add(0, index, expert(flat[index]) * weights[index, None])
        return y.view_as(x)


class LayerDrop(nn.Module):
    """Skips blocks by a random number; ReLUs let the probe run it more than once."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.blocks, self.draw = nn.ModuleList(feed_forward(F.relu) for _ in range(4)), draw

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.draw() > 0.5:
                x = x + block(x[:1])
        return x


class Holding(nn.Module):
    """A feed-forward, and a parameter or a buffer ``held``."""

    def __init__(self, code: Callable[[Any, Tensor], Any], held: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        if isinstance(held, nn.Parameter):
            self.held = held
        else:
            self.register_buffer("held", held)
        self.code = code

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=dtype) + 1)


def moving_average(self: Any, x: Tensor) -> Tensor:
    y = self.down(F.gelu(self.up(x)))
    with torch.no_grad():
        self.held.mul_(0.9).add_(y.flatten(0, -2).mean(0), alpha=0.1)
    return y - self.held


def with_linears(change: Callable[[nn.Module], Any]) -> nn.Module:
    model = Layer()
    for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        change(module)
    return model


def pruned(remove: bool, module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", 0.3)
    if remove:
        prune.remove(module, "weight")


def two_that_share(key: str) -> nn.Module:
    """Two feed-forwards in which one module or one parameter of the first stands in the second, too."""
    first, second = feed_forward(), feed_forward()
    holder, _, last = key.rpartition(".")
    setattr(second.get_submodule(holder), last, getattr(first.get_submodule(holder), last))
    return Block(
        lambda self, x: self.second(self.norm(x + self.first(x))), first=first, norm=nn.LayerNorm(WIDTH), second=second
    )


def frozen(*parts: str) -> nn.Module:
    model = Layer()
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in parts))
    return model


def hooked(module: str, kind: str, hook: Callable[..., Any]) -> nn.Module:
    model = feed_forward()
    getattr(model.get_submodule(module), f"register_{kind}")(hook)
    return model


def looped(self: Any, x: Tensor) -> Tensor:
    for _ in range(int(x.abs().mean() * 0) + 2):
        x = x + self.down(F.gelu(self.up(x)))
    return x


def stops_early(self: Any, x: Tensor) -> Tensor:
    y = x + self.down(F.gelu(self.up(x)))
    return self.near(y) if y.abs().max() > 1e-9 else y + self.far(y)


def without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = self.up(x)
    return self.down(F.gelu(hidden))


def in_place(self: Any, x: Tensor) -> Tensor:
    y = self.up(x)
    y += 1.0
    y.mul_(2).masked_fill_((torch.arange(y.shape[-2]) == 1).unsqueeze(-1), 0.5)
    y = self.down(F.relu_(y))
    y += x
    return y


def force(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        position = x.detach().requires_grad_(True)
        energy = self.down(F.gelu(self.up(position))).sum()
        return torch.autograd.grad(energy, position, create_graph=True)[0]


# Name -> (how to build it, what is split at two ranks, a part of the reason for what is whole).
MODELS: dict[str, tuple[Build, set[str], dict[str, str]]] = {
    # What it returns.
    "returns a named tuple": (on_hidden(lambda self, h: Named(self.down(h), None)), PAIR, {}),
    "returns a dataclass": (on_hidden(lambda self, h: Held([{"y": self.down(h)}])), PAIR, {}),
    "returns nested containers": (on_hidden(lambda self, h: {"a": [(self.down(h), {"n": 3})], "b": None}), PAIR, {}),
    "returns its hidden features in a dataclass": (
        on_hidden(lambda self, h: Held([{"y": self.down(h), "h": h}])),
        set(),
        {"up": RETURNED},
    ),
    "two outputs": (on_hidden(lambda self, h: (self.down(h), h)), set(), {"up": RETURNED}),
    "returns attention weights": (
        lambda: Block(
            lambda self, x: self.attention(x, x, x), attention=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        ),
        {f"attention.{n}" for n in ("in_proj_weight", "in_proj_bias", "out_proj.weight")},
        {"up": NOT_CALLED},
    ),
    "stores its hidden features": (on_hidden(lambda self, h: (setattr(self, "h", h), self.down(h))[1]), PAIR, {}),
    "stores and reads its hidden features": (
        on_hidden(lambda self, h: (setattr(self, "h", h), self.down(self.h) + self.h.mean())[1]),
        set(),
        {"up": RETURNED},
    ),
    # Control flow that depends on data.
    "branch on the input, taken": (
        lambda: Block(
            lambda self, x: self.down(F.gelu(self.up(x))) if x.sum() > -1e9 else self.other(x),
            other=nn.Linear(WIDTH, WIDTH),
        ),
        PAIR,
        {"other": NOT_CALLED},
    ),
    "branch on the input, not taken": (
        lambda: Block(
            lambda self, x: self.other(x) if x.sum() > -1e9 else self.down(F.gelu(self.up(x))),
            other=nn.Linear(WIDTH, WIDTH),
        ),
        set(),
        {"up": NOT_CALLED, "down": NOT_CALLED},
    ),
    **{
        f"branch on hidden features by {name}": (
            on_hidden(
                lambda self, h, test=test: self.down(h) if test(h) else self.other(h), other=nn.Linear(HIDDEN, WIDTH)
            ),
            set(),
            {"up": PYTHON, "other": NOT_CALLED},
        )
        for name, test in {
            "comparison": lambda h: h.mean() > -9,
            "comparisons together": lambda h: ((h > -9) & (h < 9)).all(),
            "data": lambda h: float(h.data.mean()) > -9,
            "argmax": lambda h: int(h.mean((0, 1)).argmax()) < HIDDEN,
            "equality": lambda h: not torch.equal(h, h + 1),
            "a tensor given as out": lambda h: (
                torch.sum(h.detach(), (0, 1, 2), out=torch.zeros((), dtype=h.dtype)) > -9
            ),
        }.items()
    },
    "item of hidden features": (on_hidden(lambda self, h: self.down(h / h.abs().max().item())), set(), {"up": PYTHON}),
    "mask made from hidden features": (on_hidden(lambda self, h: self.down(h * (h > 0.1))), PAIR, {}),
    "mask from all hidden features": (
        on_hidden(lambda self, h: self.down(h) * (h > 0.4).any(-1, keepdim=True)),
        set(),
        {"up": "would differ on one rank"},
    ),
    "loop over one module": (lambda: Block(looped), PAIR, {}),
    "early exit": (
        lambda: Block(stops_early, near=feed_forward(), far=feed_forward()),
        {"up", "down", "near.up", "near.down"},
        {"far.up": NOT_CALLED},
    ),
    "router": (Router, {f"experts.{e}.{n}" for e in (0, 1) for n in PAIR}, {"gate": RETURNED}),
    # Random numbers of its own.
    "layers dropped by Python": (
        partial(LayerDrop, random.random),
        {f"blocks.{i}.{n}" for i in (1, 2) for n in PAIR},
        {"blocks.0.up": NOT_CALLED, "blocks.3.down": NOT_CALLED},
    ),
    "layers dropped by numpy": (
        partial(LayerDrop, np.random.rand),
        {"blocks.1.up", "blocks.1.down"},
        {"blocks.0.up": NOT_CALLED, "blocks.3.down": NOT_CALLED},
    ),
    "stochastic depth by sample": (
        lambda: Block(lambda self, x: x + (torch.rand(len(x), 1, 1) > 0.5).to(x) * self.down(F.gelu(self.up(x)))),
        PAIR,
        {},
    ),
    "random scale inside": (on_hidden(lambda self, h: self.down(h * (1 + random.random()))), PAIR, {}),
    "random mask inside": (
        on_hidden(lambda self, h: self.down(h * (torch.rand_like(h) > 0.5))),
        set(),
        {"up": "draws random numbers"},
    ),
    # Weights that are no plain parameters.
    **{
        name: (partial(with_linears, change), set(), {name: NO_PARAMETER for name in LAYER})
        for name, change in {
            "weight norm by hook": torch.nn.utils.weight_norm,
            "weight norm": parametrizations.weight_norm,
            "spectral norm by hook": torch.nn.utils.spectral_norm,
            "spectral norm": parametrizations.spectral_norm,
            "orthogonal": parametrizations.orthogonal,
            "pruned": partial(pruned, False),
        }.items()
    },
    "pruned for good": (partial(with_linears, partial(pruned, True)), LAYER, {}),
    "spectral norm beside": (
        lambda: Block(
            lambda self, x: self.down(F.gelu(self.up(self.norm(x) * 2))),
            norm=torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        ),
        PAIR,
        {"norm": NO_PARAMETER},
    ),
    "int8 weight dequantized": (
        lambda: Holding(
            lambda self, x: self.down(F.gelu(self.up(F.linear(x, self.held.to(x) / 64)))),
            torch.randint(-99, 99, (WIDTH, WIDTH), dtype=torch.int8),
        ),
        PAIR,
        {},
    ),
    "int8 parameter": (
        lambda: Holding(
            lambda self, x: self.down(F.gelu(self.up(x)) * self.held),
            nn.Parameter(torch.full((1,), 2, dtype=torch.int8), requires_grad=False),
        ),
        PAIR,
        {},
    ),
    "buffer moved by each call": (partial(Holding, moving_average, torch.zeros(WIDTH)), PAIR, {}),
    # Parameters in two roles.
    "down by the transpose of up": (
        lambda: Block(lambda self, x: F.linear(F.gelu(self.up(x)), self.up.weight.t())),
        set(),
        {"up": ELSEWHERE, "down": NOT_CALLED},
    ),
    **{
        f"{name} beside": (
            on_output(lambda inner, y, code=code: y + code(inner)),
            split,
            {"inner.up": ELSEWHERE, "inner.down": ELSEWHERE} if not split else {},
        )
        for name, code, split in [
            ("squares of a weight", lambda inner: inner.up.weight.square().sum(), set()),
            ("squares of a bias", lambda inner: inner.up.bias.square().sum(), set()),
            ("squares of a row's bias", lambda inner: inner.down.bias.square().sum(), {"inner.up", "inner.down"}),
            ("norm of a detached weight", lambda inner: inner.down.weight.detach().norm(), set()),
            ("shape of a weight", lambda inner: inner.up.weight.shape[0], set()),
            ("shape of a bias", lambda inner: inner.up.bias.shape[0], set()),
            ("number of features", lambda inner: inner.up.out_features, {"inner.up", "inner.down"}),
        ]
    },
    "gain inside and outside": (
        lambda: Holding(lambda self, x: self.down(torch.tanh(self.up(x) * self.held)) * self.held, parameter(1)),
        set(),
        {"up": "held is used inside its group and outside"},
    ),
    "shared linear": (
        partial(two_that_share, "up"),
        set(),
        {"first.up": "called 2 times", "first.down": "called 2 times"},
    ),
    "shared weight": (
        partial(two_that_share, "up.weight"),
        set(),
        {"first.up": TIED, "first.down": TIED, "second.up": TIED},
    ),
    "shared bias of columns": (
        partial(two_that_share, "up.bias"),
        set(),
        {"first.up": ELSEWHERE, "second.down": ELSEWHERE},
    ),
    "shared bias of rows": (
        partial(two_that_share, "down.bias"),
        {f"{block}.{n}" for block in ("first", "second") for n in PAIR},
        {},
    ),
    # Which parameters, of which kinds.
    "some frozen": (partial(frozen, "q", "up", "o.bias"), LAYER, {}),
    "all frozen but norms": (partial(frozen, "attention", "mlp"), LAYER, {}),
    "complex parameter": (
        lambda: Holding(
            lambda self, x: self.down(F.gelu(self.up(torch.fft.ifft(torch.fft.fft(x) * self.held).real))),
            parameter(WIDTH, dtype=torch.complex128),
        ),
        PAIR,
        {},
    ),
    "complex output": (on_hidden(lambda self, h: torch.fft.fft(self.down(h))), PAIR, {}),
    "complex linears": (
        lambda: Holding(lambda self, x: x + self.inner(x.to(torch.complex128)).real, parameter(1)),
        set(),
        {"inner.0.weight": "it is complex", "inner.2.weight": "it is complex"},
    ),
    "no output features": (
        lambda: Block(lambda self, x: self.down(F.gelu(self.up(x))) + self.none(x).sum(), none=nn.Linear(WIDTH, 0)),
        PAIR,
        {"none": "no elements went through it"},
    ),
    "one output feature": (
        lambda: Block(lambda self, x: self.down(F.gelu(self.up(x))) * self.one(x), one=nn.Linear(WIDTH, 1)),
        PAIR,
        {"one": RETURNED},
    ),
    "one hidden feature": (
        lambda: Block(lambda self, x: self.b(F.gelu(self.a(x))), a=nn.Linear(WIDTH, 1), b=nn.Linear(1, WIDTH)),
        set(),
        {"a": "2 ranks do not divide the input features of b", "up": NOT_CALLED},
    ),
    # Hooks.
    "hooks that observe": (partial(hooked, "up", "forward_hook", lambda m, a, y: setattr(m, "seen", y)), PAIR, {}),
    "hook that logs a number": (
        partial(hooked, "up", "forward_hook", lambda m, a, y: setattr(m, "seen", y.mean().item())),
        set(),
        {"up": PYTHON},
    ),
    "hook that changes a column": (partial(hooked, "up", "forward_hook", lambda m, a, y: 2 * y + 1), PAIR, {}),
    "hook that centres a column": (
        partial(hooked, "up", "forward_hook", lambda m, a, y: y - y.mean(-1, keepdim=True)),
        set(),
        {"up": "need all outputs"},
    ),
    "hook that changes a row": (partial(hooked, "down", "forward_hook", lambda m, a, y: y.square()), PAIR, {}),
    "hook that adds a row's input": (
        partial(hooked, "down", "forward_hook", lambda m, a, y: y + a[0].mean()),
        set(),
        {"up": RETURNED},
    ),
    "hook before a row": (partial(hooked, "down", "forward_pre_hook", lambda m, a: (a[0] * 2,)), PAIR, {}),
    "backward hook": (
        partial(hooked, "down", "full_backward_hook", lambda m, into, out: (into[0] / into[0].norm(),)),
        set(),
        {"down": "backward hook", "up": "backward hook"},
    ),
    # Gradients: recomputed, switched off, taken by the model.
    **{
        f"checkpoint, reentrant {reentrant}": (
            lambda reentrant=reentrant: Block(
                lambda self, x: x + checkpoint(self.layer, x, use_reentrant=reentrant), layer=Layer()
            ),
            {f"layer.{name}" for name in LAYER},
            {"up": NOT_CALLED},
        )
        for reentrant in (True, False)
    },
    **{
        f"attention's core in a checkpoint, reentrant {reentrant}": (
            partial(CoreRecomputed, reentrant),
            set(),
            {"q": "is recomputed", "o": "is recomputed"},
        )
        for reentrant in (True, False)
    },
    **{
        f"parameter read in a checkpoint, reentrant {reentrant}": (
            lambda reentrant=reentrant: Holding(
                lambda self, x: (
                    x + checkpoint(lambda x: self.down(F.gelu(self.up(x))) * self.held, x, use_reentrant=reentrant)
                ),
                parameter(WIDTH),
            ),
            PAIR,
            {},
        )
        for reentrant in (True, False)
    },
    "column in a checkpoint": (
        lambda: Block(lambda self, x: self.down(checkpoint(lambda x: F.gelu(self.up(x)), x, use_reentrant=False))),
        PAIR,
        {},
    ),
    "hidden features leave a reentrant checkpoint": (
        lambda: Block(
            lambda self, x: sum(checkpoint(self.inner, x, use_reentrant=True)),
            inner=on_hidden(lambda self, h: (self.down(h), h.mean()))(),
        ),
        set(),
        {"inner.up": RETURNED},
    ),
    "no gradient for a column": (lambda: Block(without_gradient), PAIR, {}),
    "hidden features detached": (on_hidden(lambda self, h: self.down(h.detach())), PAIR, {}),
    "in place": (lambda: Block(in_place), PAIR, {}),
    "autograd function": (partial(feed_forward, Halved.apply), PAIR, {}),
    "forces": (lambda: Block(force), set(), {"up": "takes gradients through it", "down": "takes gradients through it"}),
    "vmap": (
        lambda: Block(lambda self, x: torch.vmap(lambda x: self.down(F.gelu(self.up(x))))(x)),
        set(),
        {"up": TRANSFORM, "down": TRANSFORM},
    ),
    "gradient by function transform": (
        lambda: Block(lambda self, x: torch.func.grad(lambda x: self.down(F.gelu(self.up(x))).square().sum())(x)),
        set(),
        {"up": TRANSFORM, "down": TRANSFORM},
    ),
    "functional call": (
        lambda: Block(
            lambda self, x: torch.func.functional_call(self.inner, dict(self.inner.named_parameters()), (x,)),
            inner=feed_forward(),
        ),
        {"inner.up", "inner.down"},
        {},
    ),
    "compiled": (
        lambda: Block(lambda self, x: x + self.inner(x), inner=torch.compile(feed_forward(), backend="eager")),  # type: ignore[arg-type]
        {"inner._orig_mod.up", "inner._orig_mod.down"},
        {},
    ),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    if name == "complex linears":
        make = partial(nn.Linear, dtype=torch.complex128)
        model.inner = nn.Sequential(make(WIDTH, HIDDEN), nn.Tanh(), make(HIDDEN, WIDTH))
    for module in model.modules():
        for values in (module._parameters, module._buffers):
            for value in values.values():
                if value is not None and value.is_floating_point():
                    value.data = value.data.double()
    return model


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape or (4, 3), WIDTH, generator=torch.Generator().manual_seed(5), dtype=dtype)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def numbers(model: nn.Module, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Outputs and gradients of two steps of gradient descent, and buffers after them."""
    found: dict[str, Tensor] = {}
    for step in range(2):
        seed(2 + step)
        model.zero_grad()
        x = inputs(dtype=dtype).requires_grad_(True)
        outputs = [torch.view_as_real(y) if y.is_complex() else y for y in tensors_in(model(x))]
        sum((y * torch.linspace(-1, 1.5, y.numel()).view_as(y)).sum() for y in outputs).backward()  # type: ignore[union-attr]
        found |= {f"{step} output {i}": y.detach() for i, y in enumerate(outputs)}
        found |= {f"{step} {n}": whole(p.grad) for n, p in [("x", x), *model.named_parameters()] if p.grad is not None}
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
    return found | {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor], floor: float = 1e-4) -> float:
    assert found.keys() == expected.keys()
    return max(relative(found[key], expected[key], floor) for key in found if found[key].numel())


def split_and_reasons(plan: lightning_tp.ShardingPlan) -> tuple[set[str], dict[str, str]]:
    split = {name for region in plan.regions for name in (*region.split_names, *region.rows)}
    return split, {entry.module: entry.reason for entry in plan.replicated}


def parallelized(model: nn.Module, x: Tensor) -> lightning_tp.ShardingPlan:
    size = dist.get_world_size()
    seed(1)
    plan = lightning_tp.find_plan(model, x, size)
    lightning_tp.parallelize(model, ParallelLayout(1, size).device_mesh("cpu"), plan)
    return plan


def on_ranks(name: str) -> tuple[tuple[set[str], dict[str, str]], dict[str, Tensor]]:
    model = build(name)
    return split_and_reasons(parallelized(model, inputs())), numbers(model)


@pytest.mark.filterwarnings("ignore")  # old names of torch.nn.utils
@pytest.mark.parametrize("name", list(MODELS))
def test_it_is_split_right_or_whole_for_a_reason(ranks2: RankPool, name: str) -> None:
    model = build(name)
    linears = {n for n, module in model.named_modules() if isinstance(module, nn.Linear)}
    expected = numbers(model)
    for (split, reasons), found in ranks2.run(on_ranks, name):
        assert split == MODELS[name][1], reasons
        for module, reason in MODELS[name][2].items():
            assert reason in reasons[module]
        told = {*split, *reasons}
        assert {n for n in linears if not {n, f"{n}.weight"} & told} == set()
        assert largest_difference(found, expected) < 1e-10


def of_dtype(dtype: torch.dtype, norms: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = Layer().to(dtype)
    model.norms.to(norms)
    return model


def of_dtype_on_ranks(dtype: torch.dtype, norms: torch.dtype) -> tuple[set[str], dict[str, Tensor]]:
    model = of_dtype(dtype, norms)
    return split_and_reasons(parallelized(model, inputs(dtype=dtype)))[0], numbers(model, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norms_too", [True, False])
def test_low_and_mixed_precision(ranks2: RankPool, dtype: torch.dtype, norms_too: bool) -> None:
    norms = dtype if norms_too else torch.float32
    expected = numbers(of_dtype(dtype, norms), dtype)
    for split, found in ranks2.run(of_dtype_on_ranks, dtype, norms):
        assert split == LAYER
        assert {key: value.dtype for key, value in found.items()} == {k: v.dtype for k, v in expected.items()}
        assert largest_difference(found, expected, floor=1.0) < 10 * torch.finfo(dtype).eps


SHAPES = [(), (1,), (5,), (2, 1, 3), (0, 3)]


def shapes_on_ranks() -> list[Tensor]:
    torch.manual_seed(0)
    model = feed_forward().double()
    parallelized(model, inputs(4, 3))
    return [model(inputs(4, 3)[0, 0] if not shape else inputs(*shape)).detach() for shape in SHAPES]


def test_inputs_of_any_shape(ranks2: RankPool) -> None:
    torch.manual_seed(0)
    model = feed_forward().double()
    expected = [model(inputs(4, 3)[0, 0] if not shape else inputs(*shape)) for shape in SHAPES]
    for found in ranks2.run(shapes_on_ranks):
        assert [y.shape for y in found] == [y.shape for y in expected]
        assert all(relative(a, b) < 1e-12 for a, b in zip(found, expected, strict=True) if a.numel())


@pytest.mark.parametrize("x", [inputs(4, 3)[0, 0], inputs(1), inputs(2, 1, 3)])
def test_a_plan_is_found_on_inputs_of_any_shape(x: Tensor) -> None:
    assert split_and_reasons(lightning_tp.find_plan(feed_forward().double(), x, 2))[0] == PAIR


@pytest.mark.parametrize(
    ("x", "reason"), [(inputs(0, 3), "no elements went through it"), (inputs() * float("nan"), "not finite")]
)
def test_inputs_that_show_nothing_leave_it_whole(x: Tensor, reason: str) -> None:
    split, reasons = split_and_reasons(lightning_tp.find_plan(feed_forward().double(), x, 2))
    assert split == set() and all(reason in reasons[name] for name in PAIR)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["buffer moved by each call", "spectral norm by hook", "spectral norm", "compiled"])
def test_planning_leaves_buffers_as_they_were(name: str) -> None:
    model = build(name)
    before = {n: buffer.clone() for n, buffer in model.named_buffers()}
    lightning_tp.find_plan(model, inputs(), 2)
    assert all(torch.equal(buffer, before[n]) and buffer.grad_fn is None for n, buffer in model.named_buffers())
    recomputed = checkpoint(model, inputs(), use_reentrant=False)  # torch's own again
    assert type(recomputed.grad_fn.next_functions) is tuple
    calls: list[int] = []
    counted = checkpoint(lambda x: (calls.append(1), x.sin())[1], inputs().requires_grad_(), use_reentrant=False)
    counted.sum().backward()
    assert len(calls) == 2


class Subclassed(nn.Parameter):
    pass


def subclassed() -> nn.Module:
    model = feed_forward()
    model.up.weight = Subclassed(model.up.weight.detach())
    return model


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(feed_forward(), {nn.Linear}, dtype=torch.qint8)


def half_quantized() -> nn.Module:
    return nn.Sequential(feed_forward(), nn.LayerNorm(WIDTH), quantized())


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return feed_forward()


def raising(error: BaseException) -> Build:
    def code(self: Any, x: Tensor) -> Tensor:
        self.up(x)
        raise error

    return lambda: Block(code)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (raising(KeyError("token")), r"could not be run once .*KeyError: 'token'. Check the example input"),
        (raising(AssertionError()), r"could not be run once .*: AssertionError\. Check"),
        (raising(ParallelConfigError("own words")), "^own words$"),
        (lambda: Block(lambda self, x: None), "returns no tensor"),
        (on_hidden(lambda self, h: self.down(h).sum().item()), "returns no tensor"),
        (on_hidden(lambda self, h: {"loss": "low"}), "returns no tensor"),
        (lambda: nn.Sequential(nn.LazyLinear(HIDDEN), nn.ReLU(), nn.LazyLinear(WIDTH)), r"0\.weight is a lazy param"),
        (subclassed, r"up\.weight is a Subclassed: .* Give the strategy the plain model"),
        (quantized, "has no parameters, .* give the plain model"),
        (nn.ReLU, "has no parameters"),
        (in_inference_mode, r"up\.weight was made under torch\.inference_mode"),
        (
            lambda: torch.jit.trace(nn.Linear(WIDTH, WIDTH), inputs().float()),
            "ScriptModule, whose code cannot be split",
        ),
        (lambda: feed_forward, "must be an nn.Module, not <function"),
        (lambda: nn.Linear, "must be an nn.Module, not <class"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused(model: Build, message: str) -> None:
    with pytest.raises(ParallelConfigError, match=message):
        lightning_tp.find_plan(model(), inputs().float(), 2)


@pytest.mark.filterwarnings("ignore")
def test_quantized_linears_beside_others_are_listed() -> None:
    split, reasons = split_and_reasons(lightning_tp.find_plan(half_quantized(), inputs().float(), 2))
    assert split == {"0.up", "0.down"}
    assert NO_PARAMETER in reasons["2.up"] and NO_PARAMETER in reasons["2.down"]


def refused_on_ranks() -> tuple[bool, list[str]]:
    model, x = feed_forward().double(), inputs()
    plan = parallelized(model, x)
    mesh = ParallelLayout(1, dist.get_world_size()).device_mesh("cpu")
    again = lightning_tp.parallelize(model, mesh, plan) is model and type(model.up).__name__ == "ParallelLinear"
    sharded = feed_forward().double()
    fully_shard(sharded)
    messages = []
    for refused in (model, sharded):
        with pytest.raises(ParallelConfigError) as error:
            lightning_tp.find_plan(refused, x, 2)
        messages.append(str(error.value))
    return again, messages


def test_a_parallel_model_is_not_planned_again(ranks2: RankPool) -> None:
    for again, messages in ranks2.run(refused_on_ranks):
        assert again
        assert all("is a DTensor: the model is already parallelized" in message for message in messages)


def decaying_on_ranks() -> None:
    model = Block(lambda self, x: self.down(F.gelu(self.up(x))) + sum(p.square().sum() for p in self.parameters()))
    parallelized(model.double(), inputs())
    model(inputs())


def test_parameters_that_are_not_read_from_their_modules_are_refused_when_it_runs(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match=r"ParallelConfigError: .*Read them from their modules \(module\.weight\)"):
        ranks2.run(decaying_on_ranks)


@pytest.mark.parametrize("size", [0, -1, 2.5, 2.0, "2", True, None])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ParallelConfigError, match=r"tensor_parallel_size is a number of ranks, 1 or more, not "):
        lightning_tp.find_plan(feed_forward(), inputs().float(), size)


@pytest.mark.parametrize("size", [1, 2, np.int64(2)])
def test_a_size_is_any_integer(size: Any) -> None:
    plan = lightning_tp.find_plan(feed_forward(), inputs().float(), size)
    assert plan.tensor_parallel_size == size
    assert split_and_reasons(plan)[0] == (PAIR if size == 2 else set())


def test_a_size_beyond_all_features_names_the_legal_ones() -> None:
    with pytest.raises(ParallelConfigError, match=r"tensor_parallel_size=1000 .*Legal sizes: \[1, 2, 4, 8, 16\]"):
        lightning_tp.find_plan(feed_forward(), inputs().float(), 1000)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"unsplittable": "what"}, ParallelConfigError, r"""unsplittable is "error" or "replicate", not 'what'"""),
        ({"unsplittable": None}, ParallelConfigError, r'unsplittable is "error" or "replicate"'),
        ({"styles": "auto"}, PlanError, "styles maps name patterns to styles"),
        ({"styles": ["up"]}, PlanError, "styles maps name patterns to styles"),
        ({"styles": {3: "column"}}, PlanError, "styles maps name patterns to styles"),
        (
            {"styles": {"up": "columns"}},
            PlanError,
            "Unknown style 'columns' .* Legal: 'column', 'row', 'split'",
        ),
        ({"styles": {"up": None}}, PlanError, "Unknown style None"),
        ({"styles": {"gate": "column"}}, PlanError, "'gate' of the plan matches no linear .* up, down"),
        ({"styles": {"up": "column"}}, PlanError, "asks for up as column, .* Change the plan for up"),
    ],
)
def test_options_that_are_none_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lightning_tp.find_plan(feed_forward(), inputs().float(), 2, **options)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (None, "example_inputs must be a tensor, a tuple .*, not NoneType"),
        ("text", "example_inputs must be .*, not str"),
        (np.zeros((2, WIDTH)), "example_inputs must be .*, not ndarray"),
        (torch.zeros(2, 3), "could not be run once"),
        (torch.zeros(2, WIDTH, dtype=torch.long), "could not be run once .*dtype"),
        (inputs(), "could not be run once .*dtype"),
        ((), "missing 1 required positional argument: 'x'"),
        ({"y": inputs().float()}, "unexpected keyword argument 'y'"),
        ({3: inputs().float()}, "keywords must be strings"),
        (lambda: 3, "returns no tensor"),
    ],
)
def test_example_inputs_that_do_not_run_are_refused(example: Any, message: str) -> None:
    with pytest.raises(ParallelConfigError, match=message):
        lightning_tp.find_plan(feed_forward(), example, 2)
