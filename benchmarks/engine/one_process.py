"""The unsplit model on rank zero."""

from __future__ import annotations

from torch import nn

from benchmarks.engine.peer import Peer


class OneProcess(Peer):
    name = "one process, 1 thread"
    note = "the unsplit model; what every ratio is to"
    alone = True

    def build(self) -> nn.Module:
        return self.setting.model()


class OneProcessTwoThreads(OneProcess):
    name = "one process, 2 threads"
    note = "the same with both cores"
    threads = 2


class OneProcessCompiled(OneProcess):
    name = "one process, 1 thread, compiled"
    note = "`torch.compile` of the whole model"
    whole = name

    def build(self) -> nn.Module:
        model = super().build()
        model.compile()
        return model
