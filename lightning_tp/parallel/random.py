"""Random numbers inside a region: different on every rank, equal again behind it, repeatable on recomputation."""

from __future__ import annotations

from typing import Any

import torch

_LARGEST_SEED = 2**62


class RankRandomness:
    """Switches the default generator to a stream of this rank between a region's columns and its rows.

    The rank's stream is seeded from the common stream, which moves on by the same amount on every rank. So tensor-
    parallel peers drop different elements of their own heads and features and the same elements elsewhere, and a
    recomputation that starts from the same common state draws the same numbers.
    """

    def __init__(self, rank: int, device: torch.device, rows: int) -> None:
        self._rank, self._device, self._rows = rank, device, rows
        self._common: Any = None
        self._left = 0

    def enter(self) -> None:
        """Called by every column; the first one switches."""
        if self._common is not None:
            return
        generator = self._generator()
        if self._device.type == "cuda":
            # Seed and offset of the counter-based generator live on the host: no synchronisation.
            seed, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + 4)
            self._common = generator.get_state()
            generator.manual_seed((seed * 1_000_003 + offset * 7919 + self._rank + 1) % _LARGEST_SEED)
        else:
            seed = int(torch.randint(_LARGEST_SEED, (), generator=generator))
            self._common = generator.get_state()
            generator.manual_seed((seed + self._rank) % _LARGEST_SEED)
        self._left = self._rows

    def leave(self) -> None:
        """Called by every row; the last one switches back."""
        self._left -= 1
        if self._left <= 0:
            self.end()

    def end(self) -> None:
        """Switch back, also where some row was not reached."""
        if self._common is not None:
            self._generator().set_state(self._common)
            self._common = None

    def _generator(self) -> torch.Generator:
        if self._device.type == "cuda":
            return torch.cuda.default_generators[self._device.index or 0]
        return torch.default_generator
