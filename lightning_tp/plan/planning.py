"""The conditions under which a model is planned: how it is run, and that it is afterwards what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tp.errors import ParallelConfigError
from lightning_tp.plan.meta import values_for_meta
from lightning_tp.plan.plain_code import plain_code
from lightning_tp.plan.state import module_state_kept, random_state_kept


def check_model(model: nn.Module) -> None:
    """Raise for a model that cannot be planned: no module, a script, lazy parameters, or those of other classes."""
    if not isinstance(model, nn.Module):
        raise ParallelConfigError(f"The model must be an nn.Module, not {model!r}.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ParallelConfigError(
                f"{name or 'The model'} is a ScriptModule, whose code cannot be split. Give the module that it is of."
            )
    if next(model.parameters(), None) is None:
        raise ParallelConfigError(
            "The model has no parameters, so there is nothing to split. Quantized modules have none: give the plain "
            "model."
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ParallelConfigError(f"{name} is a lazy parameter: run the model once before it is split.")
        if parameter.is_inference():
            raise ParallelConfigError(
                f"{name} was made under torch.inference_mode and cannot be trained: build the model outside of it."
            )
        if type(parameter) is not nn.Parameter:
            raise ParallelConfigError(
                f"{name} is a {type(parameter).__name__}: the model is already parallelized or quantized. "
                "Give the strategy the plain model."
            )


def model_runner(model: nn.Module, example_inputs: Any) -> Callable[[], Any]:
    """A call that runs ``model`` on ``example_inputs``."""
    if isinstance(example_inputs, Tensor):
        return lambda: model(example_inputs)
    if isinstance(example_inputs, Mapping):
        return lambda: model(**example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return lambda: model(*example_inputs)
    if callable(example_inputs):
        return example_inputs
    raise ParallelConfigError(
        "example_inputs must be a tensor, a tuple of arguments, a dict of keyword arguments or a callable that runs "
        f"the model, not {type(example_inputs).__name__}."
    )


@contextmanager
def planning(model: nn.Module) -> Iterator[None]:
    """``model`` in training mode with gradients for all parameters; it and all random state are kept."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    try:
        with (
            torch.inference_mode(False),
            plain_code(),
            random_state_kept(),
            values_for_meta(model),
            module_state_kept(model),
            _training_with_gradients(model),
        ):
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _training_with_gradients(model: nn.Module) -> Iterator[None]:
    """Frozen parameters count as well: they may be unfrozen later."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        for parameter in frozen:
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module, training in modes:
            module.training = training


@contextmanager
def randomised_parameters(model: nn.Module) -> Iterator[None]:
    """Small vectors (biases, gains, scales) stand at random values: a zero among them would hide what depends on it.

    Tables that are normalised in place when words are looked up in them stand at copies.
    """
    generator = torch.Generator().manual_seed(0)
    changed: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    stand_ins: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            renormalised = getattr(module, "max_norm", None) is not None
            if parameter is None or not parameter.is_floating_point() or (parameter.dim() > 1 and not renormalised):
                continue
            if id(parameter) not in stand_ins:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                stand_ins[id(parameter)] = nn.Parameter(parameter.detach() + 0.1 * noise)
            changed.append((module._parameters, key, parameter))
    try:
        for parameters, key, parameter in changed:
            parameters[key] = stand_ins[id(parameter)]
        yield
    finally:
        for parameters, key, parameter in changed:
            parameters[key] = parameter
