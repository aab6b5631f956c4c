"""For tests: run functions on ranks, and compare a module under a layout with the same module on one device."""

from lightning_tp.testing.comparison import Comparison, Difference
from lightning_tp.testing.rank_pool import RankError, RankPool
from lightning_tp.testing.same_as_one_device import assert_same_as_one_device, compare_with_one_device
from lightning_tp.testing.training_record import TrainingRecord, largest_difference, relative, train, whole

__all__ = [
    "Comparison",
    "Difference",
    "RankError",
    "RankPool",
    "TrainingRecord",
    "assert_same_as_one_device",
    "compare_with_one_device",
    "largest_difference",
    "relative",
    "train",
    "whole",
]
