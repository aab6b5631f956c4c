"""Step time of the tensor-parallel model against one process: ``python benchmarks/step_time.py [--hidden 128 512]``.

Two gloo ranks with one thread each against one process with one thread, on the Llama-style recipe. Rank zero also runs
the unsplit model, interleaved with the split one, while the other rank waits. The losses are compared before anything
is timed; of all repeats the fastest counts, and the ratio is what to quote.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning_tp import ParallelLayout, find_plan, parallelize
from recipes.llama import LlamaModule

RANKS, VOCAB, LAYERS, HEAD_SIZE = 2, 256, 4, 64


def build(hidden_size: int, sequence: int) -> nn.Module:
    torch.manual_seed(0)
    heads = hidden_size // HEAD_SIZE
    return LlamaModule(
        VOCAB, hidden_size, num_layers=LAYERS, num_heads=heads, num_kv_heads=heads, max_sequence_length=sequence
    )


def stepper(model: nn.Module, tokens: torch.Tensor) -> Callable[[], float]:
    """One step of forward, backward and AdamW; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measure(rank: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    rows = []
    for hidden_size in options.hidden:
        tokens = torch.randint(VOCAB, (options.batch, options.sequence + 1), generator=torch.Generator().manual_seed(1))
        whole = stepper(build(hidden_size, options.sequence), tokens)
        model = build(hidden_size, options.sequence)
        plan = find_plan(model, tokens[:, :-1], RANKS)
        parallelize(model, ParallelLayout(1, RANKS).device_mesh("cpu"), plan)
        split = stepper(model, tokens)
        for _ in range(2):
            one, two = whole(), split()
            if abs(one - two) > 1e-4 * abs(one):
                raise RuntimeError(f"hidden size {hidden_size}: loss {one} on one process, {two} on {RANKS} ranks")
        times: dict[str, list[float]] = {"one process": [], "tensor parallel": []}
        for _ in range(options.repeats):
            dist.barrier()
            if rank == 0:
                start = time.perf_counter()
                whole()
                times["one process"].append(time.perf_counter() - start)
            dist.barrier()
            start = time.perf_counter()
            split()
            times["tensor parallel"].append(time.perf_counter() - start)
        if rank == 0:
            one_process, parallel = min(times["one process"]), min(times["tensor parallel"])
            rows.append(
                {
                    "hidden_size": hidden_size,
                    "one_process_seconds": round(one_process, 4),
                    "tensor_parallel_seconds": round(parallel, 4),
                    "ratio": round(parallel / one_process, 3),
                    "plan_seconds": plan.found_in_seconds,
                    "all_reduces": plan.all_reduces_per_step,
                }
            )
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if rank == 0 and options.output:
        Path(options.output).write_text(json.dumps(rows, indent=2))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 512], help="multiples of 128")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--output", help="JSON file for the figures")
    options = parser.parse_args()
    mp.spawn(measure, (29_500 + os.getpid() % 1000, options), nprocs=RANKS)


if __name__ == "__main__":
    main()
