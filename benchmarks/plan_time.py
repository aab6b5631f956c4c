"""How long plans take, and how much memory: each in a process of its own, against the limits that it must keep.

``python benchmarks/plan_time.py [NAME ...]`` prints one line a model; exit status 1 if a limit is broken. A limit is on
seconds of ``find_plan`` (without imports and building), and on the peak resident memory of the whole process.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import lightning_tp


@dataclass(frozen=True)
class Case:
    """A configuration of transformers, the size it is planned for, and its limits."""

    config: str
    fields: dict[str, Any]
    size: int
    seconds: float
    gibibytes: float
    on_meta: bool = False


CASES = {
    "gpt2 (124M)": Case("GPT2", {}, 2, 2, 4),
    "gpt2 (124M), tp=4": Case("GPT2", {}, 4, 2, 4),
    "bert-base (110M)": Case("Bert", {}, 4, 2, 4),
    "vit-base (86M)": Case("ViT", {}, 4, 2, 4),
    "llama (1.1B)": Case(
        "Llama",
        {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4},
        4,
        10,
        12,
    ),
    "llama-70B": Case(
        "Llama",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "vocab_size": 128256},
        8, 30, 8, True,
    ),
    "opt-175B": Case(
        "OPT",
        {"hidden_size": 12288, "ffn_dim": 49152, "num_hidden_layers": 96, "num_attention_heads": 96,
         "word_embed_proj_dim": 12288},
        8, 30, 8, True,
    ),
    "gpt-175B": Case(
        "GPT2", {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048}, 8, 30, 8, True
    ),
}  # fmt: skip
_CLASSES = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "ViT": "ViTForImageClassification",
            "Llama": "LlamaForCausalLM", "OPT": "OPTForCausalLM"}  # fmt: skip


def measure(name: str) -> None:
    """Plan one case in this process, and print seconds, GiB, parameters and the share that is split."""
    import transformers

    case = CASES[name]
    model_class, config_class = (
        getattr(transformers, _CLASSES[case.config]),
        getattr(transformers, f"{case.config}Config"),
    )
    with lightning_tp.parameters_on_meta() if case.on_meta else nullcontext():
        model = model_class._from_config(config_class(**case.fields))
    model.config.use_cache = False
    if case.config == "ViT":
        inputs: dict[str, torch.Tensor] = {"pixel_values": torch.randn(2, 3, 224, 224)}
    else:
        ids = torch.randint(4, 100, (2, 16))
        inputs = {"input_ids": ids, "labels": ids}
    started = time.perf_counter()
    plan = lightning_tp.find_plan(model, inputs, case.size)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(seconds, peak, parameters, plan.split_share, len(plan.regions))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--one", choices=list(CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.one)
        return 0
    unknown = [name for name in arguments.names if name not in CASES]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(CASES)}")
    broken = False
    print(f"{'model':<20} {'tp':>3} {'parameters':>16} {'seconds':>14} {'peak GiB':>13} {'split':>7} {'regions':>8}")
    for name in arguments.names:
        case = CASES[name]
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=600)
        if done.returncode:
            print(f"{name:<20} failed; run it alone with --one")
            broken = True
            continue
        seconds, peak, parameters, share, regions = map(float, done.stdout.split()[-5:])
        broken |= seconds > case.seconds or peak > case.gibibytes
        print(
            f"{name:<20} {case.size:>3} {int(parameters):>16,} {seconds:>7.2f} (< {case.seconds:>2.0f}) "
            f"{peak:>6.2f} (< {case.gibibytes:>2.0f}) {share:>7.1%} {int(regions):>8}"
        )
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
