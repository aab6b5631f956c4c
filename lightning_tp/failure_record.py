"""What is known about a rank that failed, as the other ranks read it."""

from __future__ import annotations

import json
import os
import re
import traceback
from dataclasses import asdict, dataclass
from typing import Literal

_TRACEBACK_LINES = 40

# What gloo, NCCL and the stores say when a peer went away. A false match costs a wait of a few seconds, nothing else.
_CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|broken pipe|gloo|nccl|socket|tcpstore|timed out|connection", re.IGNORECASE
)


class PeerFailureError(RuntimeError):
    """This rank came through, but another rank of the same run failed."""


@dataclass(frozen=True)
class FailureRecord:
    """One rank's failure.

    ``kind``: ``error`` it raised; ``interrupt`` Ctrl-C; ``exit`` it called `sys.exit`; ``dead`` its process is gone;
    ``silent`` it lives, but gives no sign of life. ``detail``: the traceback's last lines, the exit status as a
    number, or what was observed.
    """

    rank: int
    host: str
    pid: int
    kind: Literal["error", "interrupt", "exit", "dead", "silent"]
    detail: str

    @classmethod
    def of_exception(cls, rank: int, host: str, exception: BaseException) -> FailureRecord:
        """The record of ``rank``, the calling process, that fails with ``exception``."""
        if isinstance(exception, KeyboardInterrupt):
            return cls(rank, host, os.getpid(), "interrupt", "")
        if isinstance(exception, SystemExit):
            status = exception.code if isinstance(exception.code, int) else int(exception.code is not None)
            return cls(rank, host, os.getpid(), "exit", str(status))
        lines = "".join(traceback.format_exception(exception)).rstrip().splitlines()
        return cls(rank, host, os.getpid(), "error", "\n".join(lines[-_TRACEBACK_LINES:]))

    @classmethod
    def dead(cls, rank: int, host: str) -> FailureRecord:
        """The record that a peer on ``host`` writes about a dead ``rank``."""
        return cls(rank, host, 0, "dead", "its process is gone")

    @classmethod
    def silent(cls, rank: int, host: str, observed: str) -> FailureRecord:
        """The record that a peer on ``host`` writes about a ``rank`` that does not answer."""
        return cls(rank, host, 0, "silent", observed)

    @property
    def is_exit(self) -> bool:
        """Whether the rank left by `sys.exit`: the others may do the same a moment later, so it is no news at once."""
        return self.kind == "exit"

    @property
    def is_clean(self) -> bool:
        """Whether the rank left by `sys.exit(0)`: a failure only if others wait for it in vain."""
        return self.kind == "exit" and self.detail == "0"

    def headline(self) -> str:
        """One line: which rank, and what happened to it."""
        where = f"rank {self.rank}"
        if self.kind == "error":
            return f"{where} (host {self.host}, process {self.pid}) raised {self.detail.splitlines()[-1]}"
        if self.kind == "interrupt":
            return f"{where} (host {self.host}, process {self.pid}) was interrupted"
        if self.kind == "exit":
            return f"{where} (host {self.host}, process {self.pid}) left with exit status {self.detail}"
        if self.kind == "dead":
            return f"{where} died without a message (killed? out of memory?): {self.detail}, as seen from {self.host}"
        return f"{where} does not answer (stopped? host gone?): {self.detail}, as seen from {self.host}"

    def message(self) -> str:
        """What the user reads."""
        if self.kind == "error":
            return (
                f"rank {self.rank} (host {self.host}, process {self.pid}) failed; this ends the run. Its error:\n"
                f"{self.detail}"
            )
        return f"{self.headline()}. This ends the run."

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> FailureRecord | None:
        """The record in ``text``; None for the empty text that stands for no failure."""
        return cls(**json.loads(text)) if text else None


def is_consequence(exception: BaseException) -> bool:
    """Whether ``exception`` looks like one that another rank's failure causes, such as a closed connection."""
    if isinstance(exception, PeerFailureError):
        return True
    return isinstance(exception, RuntimeError) and _CONSEQUENCE.search(str(exception)) is not None
