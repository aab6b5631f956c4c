"""Embeddings and output heads split over the vocabulary give the numbers of whole ones, for any number of words."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lightning_tp
from lightning_tp import ParallelConfigError, PlanError, ShardingPlan
from lightning_tp.layout import ParallelLayout
from lightning_tp.parallel.collectives import gather_features
from lightning_tp.testing import RankPool, assert_same_as_one_device, whole
from tests.models import FeedForward

WIDTH = 16


class Language(nn.Module):
    """A language model in small; what it returns besides its loss is used as full logits are."""

    def __init__(
        self, words: int, tied: bool = False, bias: bool = False, padding: int | None = None, scale: float | None = None
    ) -> None:
        super().__init__()
        embedding = nn.Embedding if scale is None else partial(ScaledEmbedding, scale)
        self.embedding = embedding(words, WIDTH, padding_idx=padding)
        self.block = FeedForward()
        self.head = nn.Linear(WIDTH, words, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.block(self.embedding(ids)))
        shifted = logits[:, :-1].reshape(-1, logits.shape[-1])
        loss = nn.functional.cross_entropy(shifted, ids[:, 1:].reshape(-1), label_smoothing=0.1)
        return {"loss": loss + 0.01 * logits.logsumexp(-1).square().mean()}


class ScaledEmbedding(nn.Embedding):
    def __init__(self, scale: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class ByPosition(nn.Embedding):
    """What it gives for a word depends on where the word stands, and on which word it is."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (input.unsqueeze(-1) % 3 + 1)


def ids(words: int) -> Tensor:
    return torch.randint(0, words, (4, 6), generator=torch.Generator().manual_seed(1))


KINDS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "untied with bias": {"bias": True},
    "tied with padding": {"tied": True, "padding": 2},
    "padding at the end, scaled": {"padding": -1, "scale": 3.0},
}


@pytest.mark.parametrize("words", [11, 64, 67])
@pytest.mark.parametrize("kind", list(KINDS))
def test_numbers_are_those_of_whole_tables(kind: str, words: int, ranks4: RankPool) -> None:
    model, batch = partial(Language, words, **KINDS[kind]), partial(ids, words)
    plan = lightning_tp.find_plan(model().double(), batch(), 4, vocabulary_parallel=True)
    tables = {shard.parameter for region in plan.regions if region.vocabulary for shard in region.shards}
    assert {"embedding.weight"} <= tables
    assert plan.split_share == 1.0
    for layout in (4, (2, 2)):
        assert_same_as_one_device(model, batch, layout, vocabulary_parallel=True, pool=ranks4)


def held_on_ranks(words: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Language(words, tied=True)
    mesh = ParallelLayout(1, dist.get_world_size()).device_mesh("cpu")
    plan = lightning_tp.find_plan(model, ids(words), dist.get_world_size(), vocabulary_parallel=True)
    before = model.embedding.weight.detach().clone()
    lightning_tp.parallelize(model, mesh, plan)
    assert isinstance(model.embedding.weight, DTensor)
    assert model.head.weight is model.embedding.weight
    counted: Counter[str] = Counter()
    forward, gather = dist.all_reduce, dist.all_gather_into_tensor

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counted[f"all_reduce {tuple(tensor.shape)}"] += 1
        return forward(tensor, *args, **kwargs)

    def all_gather(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        counted["all_gather"] += 1
        return gather(output, *args, **kwargs)

    dist.all_reduce, dist.all_gather_into_tensor = all_reduce, all_gather
    try:
        loss = model(ids(words))["loss"]
        forwards = dict(counted)
        counted.clear()
        loss.backward()
    finally:
        dist.all_reduce, dist.all_gather_into_tensor = forward, gather
    wrong = ""
    try:
        model(torch.full((1, 2), words))
    except IndexError as error:
        wrong = str(error)
    return {
        "held": model.embedding.weight.to_local().numel(),
        "same": bool(torch.equal(whole(model.embedding.weight), before)),
        "forward": forwards,
        "backward": dict(counted),
        "wrong": wrong,
    }


def test_each_rank_holds_its_words_and_pays_one_message_a_table(ranks4: RankPool) -> None:
    results = ranks4.run(held_on_ranks, 67)
    assert [result["held"] // WIDTH for result in results] == [17, 17, 17, 16]
    for result in results:
        assert result["same"]
        reduced = f"all_reduce {(4, 6, WIDTH)}"
        assert result["forward"] == {reduced: 2, "all_gather": 1}  # the embedding and the block's row
        assert result["backward"] == {reduced: 2}  # the head's input and the block's
        assert "ids reach from 67 to 67, and the embedding has 67 words" in result["wrong"]


def gathered_on_ranks(features: int) -> tuple[bool, bool]:
    full = torch.randn(3, features, generator=torch.Generator().manual_seed(0))
    share = -(-features // dist.get_world_size())
    start = dist.get_rank() * share
    mine = full[:, start : start + share].clone().requires_grad_(True)
    found = gather_features(mine, features, dist.group.WORLD)
    found.backward(full)
    return torch.equal(found, full), torch.equal(mine.grad, full[:, start : start + share])


@pytest.mark.parametrize("features", [8, 11, 13])
def test_gathered_features_are_in_order_and_their_gradients_too(features: int, ranks4: RankPool) -> None:
    assert ranks4.run(gathered_on_ranks, features) == [(True, True)] * 4


def whole_reason(model: nn.Module, batch: Tensor, name: str, size: int = 2, **options: Any) -> str:
    plan = lightning_tp.find_plan(model, batch, size, **{"vocabulary_parallel": True, **options})
    assert not any(region.vocabulary and name in region.vocabulary.members for region in plan.regions)
    return next(entry.reason for entry in plan.replicated if entry.module == name)


class ReadsTable(Language):
    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(ids)["loss"] + self.embedding.weight.square().mean()}


class ReadsSize(Language):
    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.block(self.embedding(ids)))
        return {"loss": logits.view(-1, self.head.weight.shape[0]).logsumexp(-1).mean()}


class TiedByHand(Language):
    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        hidden = self.block(self.embedding(ids))
        return {"loss": nn.functional.linear(hidden, self.embedding.weight).logsumexp(-1).mean()}


def test_tables_that_cannot_be_split_stay_whole_with_the_reason() -> None:
    batch = ids(64)
    assert "the model reads embedding.weight" in whole_reason(ReadsTable(64), batch, "embedding")
    assert "the model reads head.weight" in whole_reason(ReadsSize(64), batch, "head")
    assert "the model reads embedding.weight" in whole_reason(TiedByHand(64), batch, "embedding")
    model = Language(64)
    model.embedding.max_norm = 1.0
    assert "max_norm" in whole_reason(model, batch, "embedding")
    model = Language(64)
    model.embedding = ByPosition(64, WIDTH)
    assert "numbers differ" in whole_reason(model, batch, "embedding")
    assert "fewer words than 8 ranks" in whole_reason(Language(11), ids(11), "embedding", 8)
    assert "would not pay" in whole_reason(Language(64), batch, "embedding", vocabulary_parallel="auto")
    assert "vocabulary_parallel=False" in whole_reason(Language(64), batch, "embedding", vocabulary_parallel=False)


def test_auto_splits_what_pays() -> None:
    plan = lightning_tp.find_plan(Language(2000, tied=True), ids(2000), 2)
    (table,) = [region for region in plan.regions if region.vocabulary]
    assert table.vocabulary is not None and table.vocabulary.members == ("embedding", "head")
    assert plan.all_reduces_per_step == 4


def test_a_plan_by_names_and_a_saved_one(tmp_path: Any) -> None:
    model, batch = Language(67, tied=True, bias=True), ids(67)
    styles = {"*.up": "column", "*.down": "row", "embedding": "vocabulary", "head": "vocabulary"}
    plan = lightning_tp.find_plan(model, batch, 2, styles=styles)
    assert [region.vocabulary is not None for region in plan.regions].count(True) == 1
    plan.save(tmp_path / "plan.yaml")
    assert ShardingPlan.load(tmp_path / "plan.yaml") == plan
    lightning_tp.prove_plan(model, batch, plan)
    with pytest.raises(PlanError, match=r"split the words of block.*, but it is no embedding and no output head"):
        lightning_tp.find_plan(model, batch, 2, styles={"block": "vocabulary"})


def mutated(plan: ShardingPlan, **changes: Any) -> ShardingPlan:
    data = plan.to_dict()
    (table,) = [region for region in data["regions"] if region["vocabulary"]]
    for key, value in changes.items():
        if key == "rows":
            table["shards"][0]["rows"] = value
        else:
            table["vocabulary"][key] = value
    return ShardingPlan.from_dict(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": [[[0, 30]], [[30, 67]]]}, "words of embedding.weight are not those"),
        ({"rows": [[[34, 67]], [[0, 34]]]}, "words of embedding.weight are not those"),
        ({"heads": []}, "hold the table"),
        ({"embeddings": ["head"], "heads": ["embedding"]}, "no plain linear"),
    ],
)
def test_wrong_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    model, batch = Language(67, tied=True), ids(67)
    plan = lightning_tp.find_plan(model, batch, 2, vocabulary_parallel=True)
    with pytest.raises(PlanError, match=message):
        lightning_tp.prove_plan(model, batch, mutated(plan, **changes))
    reads = ReadsTable(67, tied=True)
    with pytest.raises(PlanError, match=r"reads embedding\.weight past the module"):
        lightning_tp.prove_plan(reads, batch, plan)


def test_the_option_is_checked() -> None:
    with pytest.raises(ParallelConfigError, match="vocabulary_parallel must be"):
        lightning_tp.TensorParallelStrategy(vocabulary_parallel="always")  # type: ignore[arg-type]
    with pytest.raises(ParallelConfigError, match="vocabulary_parallel is"):
        lightning_tp.find_plan(Language(64), ids(64), 2, vocabulary_parallel="always")  # type: ignore[arg-type]
