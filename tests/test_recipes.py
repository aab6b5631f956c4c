"""The recipes as models and data of one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from recipes.data import TextDataModule
from recipes.gpt import GPTModule
from recipes.language_model import LanguageModel, warmup_cosine
from recipes.llama import Attention, LlamaModule, rotary_tables, rotate

Factory = Callable[[], LanguageModel]


def tiny_llama(**changes: Any) -> LlamaModule:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_sequence_length": 32,
    }
    return LlamaModule(**(sizes | changes))


def tiny_gpt() -> GPTModule:
    return GPTModule(hidden_size=64, num_layers=2, num_heads=4, dropout=0.0, block_size=32)


both_models = pytest.mark.parametrize("build", [tiny_llama, tiny_gpt])


def random_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))


@both_models
def test_a_later_token_does_not_change_earlier_logits(build: Factory) -> None:
    model = build().eval()
    tokens = random_tokens(2, 32)
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-6)
    assert (before[:, 20:] - after[:, 20:]).abs().amax(dim=(0, 2)).min() > 1e-4


@both_models
def test_the_untrained_loss_is_that_of_a_uniform_guess(build: Factory) -> None:
    seed_everything(0, verbose=False)
    tokens = random_tokens(4, 33)
    assert build().loss((tokens[:, :-1], tokens[:, 1:])).item() == pytest.approx(math.log(256), abs=0.1)


@both_models
def test_every_parameter_gets_a_gradient(build: Factory) -> None:
    model = build()
    tokens = random_tokens(4, 33)
    model.loss((tokens[:, :-1], tokens[:, 1:])).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_the_default_sizes_have_at_least_three_million_parameters() -> None:
    assert sum(parameter.numel() for parameter in LlamaModule().parameters()) >= 3_000_000
    assert sum(parameter.numel() for parameter in GPTModule().parameters()) >= 3_000_000


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = tiny_llama(tie_embeddings=True), tiny_llama(tie_embeddings=False)
    count = {model: sum(parameter.numel() for parameter in model.parameters()) for model in (tied, untied)}
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    assert count[untied] - count[tied] == 256 * 64


def test_rotary_is_a_rotation_in_the_complex_plane() -> None:
    head_dim, length = 8, 16
    x = torch.randn(2, 3, length, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary_tables(head_dim, length, base=10_000.0)
    half = head_dim // 2
    angles = torch.tensor([[m * 10_000.0 ** (-2 * i / head_dim) for i in range(half)] for m in range(length)])
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(rotate(x, cos, sin), expected, rtol=0, atol=1e-6, check_dtype=False)


def test_grouped_queries_equal_repeated_key_value_heads() -> None:
    grouped, full = Attention(64, num_heads=4, num_kv_heads=2), Attention(64, num_heads=4, num_kv_heads=4)
    weights = grouped.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        # Each of the two heads of 16 rows serves two query heads in a row.
        weights[name] = weights[name].view(2, 16, 64)[[0, 0, 1, 1]].reshape(64, 64)
    full.load_state_dict(weights)
    x = torch.randn(2, 10, 64)
    cos, sin = rotary_tables(16, 10, base=10_000.0)
    torch.testing.assert_close(grouped(x, cos, sin), full(x, cos, sin))


def test_rotary_tables_are_no_part_of_a_checkpoint() -> None:
    assert not {"cos", "sin"} & set(tiny_llama().state_dict())


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="must divide num_heads=4"):
        tiny_llama(num_kv_heads=3)
    with pytest.raises(ValueError, match="hidden_size=65"):
        tiny_llama(hidden_size=65)
    with pytest.raises(ValueError, match="num_heads=5 must divide hidden_size=64"):
        GPTModule(hidden_size=64, num_heads=5)


def test_dropout_acts_in_training_only() -> None:
    model = GPTModule(hidden_size=64, num_layers=1, num_heads=4, dropout=0.5, block_size=32)
    tokens = random_tokens(1, 8)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@both_models
def test_one_seed_gives_one_text(build: Factory) -> None:
    model = build().train()
    prompt = random_tokens(2, 3)
    # More than fits into the context, so that it has to be cut.
    texts = [model.generate(prompt, 40, 1.0, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]
    assert texts[0].shape == (2, 43)
    assert torch.equal(texts[0][:, :3], prompt)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert model.training


def test_temperature_zero_takes_the_most_likely_token() -> None:
    model = tiny_llama().eval()
    tokens = model.generate(random_tokens(1, 4), 3, temperature=0)
    for position in range(4, 7):
        assert tokens[0, position] == model(tokens[:, :position])[0, -1].argmax()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        tiny_llama().generate(torch.zeros(1, 0, dtype=torch.long), 1)


def test_the_schedule_warms_up_and_falls_to_the_final_ratio() -> None:
    rates = [warmup_cosine(step, warmup_steps=4, total_steps=14, final_ratio=0.1) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.55)
    assert rates[14:] == pytest.approx([0.1] * 6)


def test_a_run_without_end_has_no_schedule() -> None:
    data = TextDataModule(sequence_length=32, batch_size=2, val_sequences=2)
    trainer = Trainer(max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"Set trainer\.max_steps or trainer\.max_epochs"):
        trainer.fit(tiny_llama(), datamodule=data)


def starts(data: TextDataModule, name: str) -> Tensor:
    data.setup()
    return data.datasets[name].starts


def test_the_order_of_the_data_depends_on_its_seed_alone() -> None:
    batches = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        data = TextDataModule(batch_size=4, seed=7)
        data.setup()
        loader = iter(data.train_dataloader())
        batches.append([next(loader) for _ in range(3)])
    torch.testing.assert_close(batches[0], batches[1], rtol=0, atol=0)
    assert not torch.equal(starts(TextDataModule(seed=7), "train"), starts(TextDataModule(seed=8), "train"))


def test_the_complete_text_is_read_and_split_without_overlap() -> None:
    data = TextDataModule(sequence_length=128, val_sequences=64)
    train, held_out, validation = starts(data, "train"), starts(data, "test"), starts(data, "val")
    text = data.datasets["train"].text
    assert len(text) == 5_055_611
    assert bytes(text[:26].tolist()) == b"ALL'S WELL THAT ENDS WELL\n"
    split = 5_055_611 - 252_780
    # The last target of a training window lies before the first held-out byte.
    assert train.max() + 128 < split <= held_out.min()
    assert sorted(train.tolist()) == list(range(0, split - 128, 128))
    assert len(validation) == 64
    assert set(validation.tolist()) <= set(held_out.tolist())
    assert validation.max() - validation.min() > 0.95 * 252_780


def test_targets_are_the_inputs_one_byte_later(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 8)
    data = TextDataModule(path=path, sequence_length=16, batch_size=4, val_sequences=2)
    data.setup()
    for name in ("train", "val", "test"):
        inputs, targets = next(iter(data.loader(name)))
        assert inputs.shape == targets.shape
        assert inputs.dtype == torch.int64
        torch.testing.assert_close(targets, (inputs + 1) % 256)


def test_a_text_that_is_too_short_or_absent_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"too short" * 10)
    with pytest.raises(ValueError, match="val_sequences=512"):
        TextDataModule(path=path, sequence_length=16).setup()
    with pytest.raises(FileNotFoundError, match=r"data\.path"):
        TextDataModule(path=tmp_path / "absent.txt").setup()
