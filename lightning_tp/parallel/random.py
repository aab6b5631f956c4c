"""Random numbers inside a region: different on every rank, equal again behind it, repeatable on recomputation."""

from __future__ import annotations

from typing import Any

import torch

from lightning_tp.parallel.scope import change

LARGEST_SEED = 2**62


class RankRandomness:
    """Switches the default generator to a stream of this rank between a region's columns and its rows.

    The rank's stream is seeded from the common stream, which moves on by the same amount on every rank. So tensor-
    parallel peers drop different elements of their own heads and features and the same elements elsewhere, and a
    recomputation that starts from the same common state draws the same numbers.

    Code that torch.compile traces cannot switch generators: there it only says whether it runs ``inside`` (see
    :mod:`lightning_tp.parallel.compiled_dropout`).
    """

    def __init__(self, rank: int, device: torch.device, rows: int) -> None:
        self.rank, self._device, self._rows = rank, device, rows
        self.inside = False
        self._common: Any = None
        self._left = 0

    def enter(self) -> None:
        """Called by every column; the first one switches."""
        if not self.inside:
            change(self._switch, True)
            if not torch.compiler.is_compiling():
                self._start_own_stream()

    def leave(self) -> None:
        """Called by every row; the last one switches back."""
        if self._left > 1:
            change(self._count)
        else:
            self.end()

    def end(self) -> None:
        """Switch back, also where some row was not reached."""
        if self.inside:
            change(self._switch, False)
            if not torch.compiler.is_compiling():
                default_generator(self._device).set_state(self._common)
                self._common = None

    def forget(self) -> None:
        """A recomputation stops as soon as it has what it needs, inside a region too; its generator state is gone."""
        if self.inside:
            change(self._switch, False)
            self._common = None

    def _start_own_stream(self) -> None:
        generator = default_generator(self._device)
        if self._device.type == "cuda":
            # Seed and offset of the counter-based generator live on the host: no synchronisation.
            seed, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + 4)
            self._common = generator.get_state()
            generator.manual_seed((seed * 1_000_003 + offset * 7919 + self.rank + 1) % LARGEST_SEED)
        else:
            seed = int(torch.randint(LARGEST_SEED, (), generator=generator))
            self._common = generator.get_state()
            generator.manual_seed((seed + self.rank) % LARGEST_SEED)

    def _switch(self, inside: bool) -> None:
        self.inside, self._left = inside, self._rows

    def _count(self) -> None:
        self._left -= 1


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random functions use on ``device`` if they are given none."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
