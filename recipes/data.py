"""Bytes of a text as training and validation windows."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SHAKESPEARE = Path(__file__).parent / "data" / "shakespeare.txt.gz"
VALIDATION_SHARE = 0.05


def read_bytes(path: Path) -> Tensor:
    """The text at ``path``, unpacked if its name ends in ``.gz``, as bytes ``[length]`` (uint8)."""
    if not path.is_file():
        raise FileNotFoundError(f"data.path={path} is no file. Give a text file, or a .gz of one.")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``text`` that begin at ``starts``.

    One item is ``(inputs, targets)``, each ``[sequence_length]`` int64, the targets one byte later.
    """

    def __init__(self, text: Tensor, starts: Tensor, sequence_length: int) -> None:
        self.text = text
        self.starts = starts
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(self.starts[index])
        window = self.text[start : start + self.sequence_length + 1].long()
        return window[:-1], window[1:]


class TextDataModule(LightningDataModule):
    """Next-byte windows of one text; its last 5% are held out.

    The training windows are permuted once, from ``seed`` alone, and then read in order: any number of processes and any
    state of the global random generator give the same batches in the same order.

    Args:
        path: a text file, or a ``.gz`` of one; the complete Shakespeare if not given.
        sequence_length: bytes of one window.
        batch_size: windows of one batch on one device.
        val_sequences: validation windows, spread evenly over the held-out text. ``test`` reads all of it.
        seed: order of the training windows.
        num_workers: loader processes; the text is in memory, so none is fast.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        sequence_length: int = 128,
        batch_size: int = 16,
        val_sequences: int = 512,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.path = SHAKESPEARE if path is None else Path(path)
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.val_sequences = val_sequences
        self.seed = seed
        self.num_workers = num_workers
        self.datasets: dict[str, Windows] = {}

    def setup(self, stage: str | None = None) -> None:
        if self.datasets:
            return
        text = read_bytes(self.path)
        split = len(text) - int(len(text) * VALIDATION_SHARE)
        length = self.sequence_length
        # A window needs one byte more than it is long: the last target.
        train_starts = torch.tensor(range(0, split - length, length))
        held_out_starts = torch.tensor(range(split, len(text) - length, length))
        if len(train_starts) < self.batch_size or len(held_out_starts) < self.val_sequences:
            raise ValueError(
                f"{self.path} has {len(train_starts)} training and {len(held_out_starts)} held-out windows of {length} "
                f"bytes, but data.batch_size={self.batch_size} and data.val_sequences={self.val_sequences} were asked. "
                "Lower these or data.sequence_length, or give a longer text."
            )
        order = torch.randperm(len(train_starts), generator=torch.Generator().manual_seed(self.seed))
        spread = torch.arange(self.val_sequences) * len(held_out_starts) // self.val_sequences
        self.datasets = {
            "train": Windows(text, train_starts[order], length),
            "val": Windows(text, held_out_starts[spread], length),
            "test": Windows(text, held_out_starts, length),
        }

    def loader(self, name: str) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(
            self.datasets[name],
            batch_size=self.batch_size,
            shuffle=False,
            drop_last=name == "train",
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self.loader("train")

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self.loader("val")

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self.loader("test")
