"""The process of one rank: where it runs, how it leaves, and that it does not outlive the process that started it."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import NoReturn

_PARENT_GRACE = 6.0  # seconds for the watchdog, which knows more, to speak and leave first


def host_location() -> str:
    """A name that two processes share exactly when each can look at the other by its process id."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():  # not Linux
        return f"{socket.gethostname()}/{uuid.getnode()}"
    return f"{socket.gethostname()}/{boot.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


def leave() -> NoReturn:
    """End this process with exit status 1 from any thread, whatever the main thread hangs in."""
    # The main thread may hang while it holds the lock of a stream: flush at most for two seconds.
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(2.0)
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(1)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def exit_with_parent(parent: int, who: str) -> None:
    """End this process, named ``who`` in the message, soon after the process with the id ``parent`` has ended."""
    threading.Thread(target=_wait_for_parent, args=(parent, who), name="lightning_tp-parent", daemon=True).start()


def _wait_for_parent(parent: int, who: str) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(_PARENT_GRACE)
    print(f"\n[lightning_tp] {who}: the process that started it is gone, so it ends.", file=sys.stderr, flush=True)
    leave()
