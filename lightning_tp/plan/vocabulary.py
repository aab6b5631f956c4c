"""Tables of words: embeddings and output heads that are split over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_tp.parallel.vocabulary import local_padding, own_words
from lightning_tp.plan.candidate import Probe
from lightning_tp.plan.compare import TOLERANCE, NotProven, difference
from lightning_tp.plan.linears import linear_adapter
from lightning_tp.plan.sharding_plan import AttributeChange, Ranges, Region, SplitParameter, Vocabulary, word_ranges
from lightning_tp.plan.stand_ins import Slots, changed_attributes, swapped
from lightning_tp.plan.trace import ModuleCall

VocabularyParallel = Literal["auto"] | bool

_NO_HEAD = "it is no output head for many words"
_FEWEST_WORDS = 1024
_FEWEST_OTHERS = 16_384
"""Rows of a table that is split where the model has none of as many words at its other end: no table of positions."""
_SMALLEST_SHARE = 0.02
"""Of the parameters that a rank would hold without the table: below this a split does not pay for its messages."""
_FEATURES = 4
"""Features with which a lookup is proven: it treats all alike, and whole tables can be large."""


class Vocabularies:
    """The search for tables of words.

    Args:
        regions: What is split already.
        mode: Whether to split tables: "auto" where it pays.
        wanted: Whether a plan that was given asks for a module; None without such a plan.

    Attributes:
        regions: The tables that are split.
        reasons: For each embedding that is not: why.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Probe,
        regions: list[Region],
        size: int,
        mode: VocabularyParallel,
        wanted: Callable[[str], bool] | None,
    ) -> None:
        self._model, self._found, self._size, self._mode, self._wanted = model, found, size, mode, wanted
        self._parameters = dict(model.named_parameters())
        self._holders: dict[str, list[str]] = {}
        names = {id(p): name for name, p in self._parameters.items()}
        for holder, module in model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._holders.setdefault(names[id(parameter)], []).append(holder)
        self._taken = {name for region in regions for name in (*region.partial, *(s.parameter for s in region.shards))}
        split = {name for region in regions for name in (*(column.module for column in region.columns), *region.rows)}
        self._heads = [name for name in found.finals if name not in split]
        self._words_in = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
        self._words_out = {found.linears[head].output_features for head in self._heads}
        self._total = sum(parameter.numel() for parameter in self._parameters.values())
        self.regions: list[Region] = []
        self.reasons: dict[str, str] = {}
        tables = {name: holders for name, holders in self._holders.items() if any(map(self._is_embedding, holders))}
        for name in (*tables, *(f"{head}.weight" for head in self._heads)):
            if name not in self._parameters or name in {s.parameter for r in self.regions for s in r.shards}:
                continue
            try:
                self.regions.append(self._region(name, self._holders[name]))
            except NotProven as reason:
                if str(reason) != _NO_HEAD:  # of other linears the probe has said why
                    for holder in self._holders[name]:
                        self.reasons.setdefault(holder, str(reason))

    def _is_embedding(self, module: str) -> bool:
        return isinstance(self._model.get_submodule(module), nn.Embedding)

    def _region(self, name: str, holders: list[str]) -> Region:
        weight = self._parameters[name]
        embeddings = [holder for holder in holders if self._is_embedding(holder)]
        heads = [holder for holder in holders if holder not in embeddings]
        ranges = word_ranges(weight.shape[0], self._size) if weight.dim() == 2 else None
        self._check_wanted(weight, embeddings, heads)
        if name in self._taken:
            raise NotProven("it belongs to a region")
        if ranges is None:
            raise NotProven(f"it has fewer words than {self._size} ranks can share")
        self._check_readers(name, holders)
        for head in heads:
            adapter = linear_adapter(self._model.get_submodule(head))
            if head not in self._heads or adapter is None or adapter.output_dim != 0:
                raise NotProven(f"its weight is tied to {head}, which is no output head")
        called = [embedding for embedding in embeddings if embedding in self._found.run.module_calls]
        errors = [0.0]
        for embedding in called:
            for call in self._found.run.module_calls[embedding][:2]:
                errors.append(prove_lookup(self._model, embedding, call, ranges))
        if not called and not heads:
            raise NotProven("it was not called when the model was probed")
        shards = [SplitParameter(ranges, name, 0)]
        for head in heads:
            bias = self._bias(head)
            if bias is not None:
                self._check_readers(bias, [head])
                shards.append(SplitParameter(ranges, bias, 0))
        return Region(
            module=(*called, *heads)[0],
            columns=(),
            rows=(),
            inputs=(),
            shards=tuple(shards),
            vocabulary=Vocabulary(tuple(embeddings), tuple(heads)),
            found_by="adapter",
            error=max(errors),
        )

    def _check_wanted(self, weight: Tensor, embeddings: list[str], heads: list[str]) -> None:
        if self._wanted is not None:
            if not any(map(self._wanted, (*embeddings, *heads))):
                raise NotProven("the given plan does not split it")
        elif self._mode is False:
            raise NotProven("vocabulary_parallel=False")
        else:
            words, features = weight.shape
            read_and_written = words in self._words_in and words in self._words_out
            if not read_and_written and words < 4 * features:
                raise NotProven("it is no table of words" if embeddings else _NO_HEAD)
            share = weight.numel() * self._size / self._total
            fewest = _FEWEST_WORDS if read_and_written else _FEWEST_OTHERS
            if self._mode == "auto" and (words < fewest or share < _SMALLEST_SHARE):
                raise NotProven("a split over its words would not pay (vocabulary_parallel=True forces it)")

    def _check_readers(self, name: str, holders: list[str]) -> None:
        """Raise where code past the modules that hold a parameter reads it, and would find this rank's rows."""
        others = sorted(self._found.readers.get(name, set()) - set(holders))
        if others:
            raise NotProven(f"{others[0] or 'the model'} reads {name} past the module that holds it")

    def _bias(self, head: str) -> str | None:
        bias = self._model.get_submodule(head)._parameters.get("bias")
        return next((name for name, p in self._parameters.items() if p is bias), None) if bias is not None else None


def prove_lookup(model: nn.Module, name: str, call: ModuleCall, ranges: tuple[Ranges, ...]) -> float:
    """Look a call's ids up in a table of a few features, whole and on all ranks: the largest relative difference.

    Raises:
        NotProven: the ranks' vectors do not add up to the whole table's, or its gradients differ.
    """
    module = call.module
    weight = module._parameters.get("weight")
    plain = isinstance(module, nn.Embedding) and set(module._parameters) == {"weight"} and not module._modules
    if not plain or weight is None:
        raise NotProven("its class does more than look words up")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise NotProven("it has max_norm, scale_grad_by_freq or sparse, which need the whole table")
    given = (*call.args, *call.kwargs.values())
    ids = given[0] if len(given) == 1 else None
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        raise NotProven("it is called with more than ids")
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(weight.shape[0], _FEATURES, dtype=torch.float64, generator=generator).requires_grad_(True)
    slots: Slots = [(module, "weight", weight)]

    def looked_up(rows: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        change = AttributeChange(name, "padding_idx", padding)
        with swapped(module, slots, {id(weight): rows}, torch.float64), changed_attributes(model, [change]):
            return module.forward(ids)

    try:
        whole = looked_up(table, ids, module.padding_idx)
        projection = torch.randn(whole.shape, dtype=whole.dtype, generator=generator)
        (expected,) = torch.autograd.grad((whole * projection).sum(), [table])
        parts: list[Tensor] = []
        grads: list[Tensor] = []
        for ((first, stop),) in ranges:
            rows = table.detach()[first:stop].clone().requires_grad_(True)
            lookup = partial(looked_up, rows, padding=local_padding(module.padding_idx, first, stop))
            part = own_words(lookup, ids, first, stop)
            grads += torch.autograd.grad((part * projection).sum(), [rows])
            parts.append(part.detach())
        worst = max(difference(whole.detach(), parts), difference(expected, [torch.cat(grads)]))
    except Exception as error:
        raise NotProven(f"its lookup does not run on a rank's words: {type(error).__name__}: {error}"[:200]) from error
    if worst > TOLERANCE[torch.float64]:
        raise NotProven(f"its numbers differ by {worst:.1e}")
    return worst
