"""What a peer is: one way to train the model of a setting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.engine.setting import LEARNING_RATE, Setting


class Unavailable(Exception):
    """A peer cannot run here; the message says why."""


class Peer(ABC):
    """One implementation. It is built once on every rank that it uses, and then steps whenever it is asked to.

    Attributes:
        name: Its row in the table.
        note: What a reader has to know about it.
        alone: It uses rank zero only, while the other ranks wait.
        threads: Threads of each rank.
        required: The benchmark fails if it fails.
        float64: It computes in float64 if the setting asks for it.
        whole: The peer that runs the same code unsplit in one process.
    """

    name: ClassVar[str]
    note: ClassVar[str] = ""
    alone: ClassVar[bool] = False
    threads: ClassVar[int] = 1
    required: ClassVar[bool] = True
    float64: ClassVar[bool] = True
    whole: ClassVar[str] = "one process, 1 thread"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.tokens = setting.tokens()
        self.model = self.build()
        self.optimizer = self.build_optimizer()

    @abstractmethod
    def build(self) -> nn.Module:
        """What this rank trains, with the values of ``setting.model()``.

        Raises:
            Unavailable: it cannot run here.
        """

    def build_optimizer(self) -> Any:
        return fused_adamw(self.model.parameters())

    def loss(self) -> Tensor:
        """Mean cross-entropy of the samples of this rank."""
        return next_token_loss(self.model, self.tokens)

    def step(self) -> Tensor:
        """Forward, backward and optimizer step; the loss of this rank's samples before the step."""
        self.release_gradients()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def release_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def whole_loss(self, loss: Tensor) -> float:
        """The mean over all samples of what :meth:`step` has returned."""
        return loss.item()

    def is_split(self, parameter: Tensor) -> bool:
        """Whether ranks hold different parts of ``parameter``, where that is a plain tensor."""
        return False

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients of the last step, of the whole model. Collective unless the peer is alone."""
        sums = torch.zeros(2, dtype=torch.float64)
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if gradient is not None:
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                sums[int(self.is_split(parameter))] += whole.double().square().sum()
        split = sums[1:]
        if not self.alone:
            dist.all_reduce(split)
        return (sums[0] + split[0]).sqrt().item()

    def tensors_held(self) -> Sequence[Tensor]:
        """What this rank holds between steps, as plain tensors: parameters, buffers and the optimizer's state.

        Called while the gradients of a step are there.
        """
        held = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state.values():
            held += [value for value in state.values() if isinstance(value, Tensor)]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]


def plain_and_distributed(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Groups for an optimizer, one call of which cannot take both plain tensors and DTensors."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if isinstance(parameter, DTensor) is distributed]}
        for distributed in (True, False)
    ]


def fused_adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of every peer."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of ``model(tokens [batch, sequence]) -> logits [batch, sequence, words]``.

    Args:
        tokens: ``[batch, sequence + 1]``.
    """
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
