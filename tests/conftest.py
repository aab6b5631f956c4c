from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

# Before torch is imported: two ranks on two cores, and sums in the same order on every machine.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"
# No plan of an earlier run, and none for later ones.
os.environ["LIGHTNING_TP_CACHE"] = tempfile.mkdtemp(prefix="lightning-tp-plans-")

import pytest
import torch

from lightning_tp.testing import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_plans_left() -> Iterator[None]:
    """The folder of this session's plans goes when it ends."""
    yield
    shutil.rmtree(os.environ["LIGHTNING_TP_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two gloo ranks; see `RankPool`."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four gloo ranks; see `RankPool`."""
    pool = RankPool(4)
    yield pool
    pool.close()
