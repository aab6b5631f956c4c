"""`lightning-tp inspect`: plan a model without devices and processes, and show what is split and why."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_tp.errors import ParallelConfigError
from lightning_tp.inspection.explain import explain
from lightning_tp.inspection.report import Inspection, print_report
from lightning_tp.inspection.roles import parameter_roles
from lightning_tp.inspection.sources import opened
from lightning_tp.inspection.subject import InspectError
from lightning_tp.inspection.summary import folded_regions, folded_whole
from lightning_tp.inspection.tp_plan import compare_with_tp_plan
from lightning_tp.plan.find import SearchOptions, search_plan
from lightning_tp.plan.vocabulary import VocabularyParallel
from lightning_tp.verify import add_config_arguments

_VOCABULARY_PARALLEL: dict[str, VocabularyParallel] = {"auto": "auto", "true": True, "false": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lightning-tp inspect`` to ``parser``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="package.module:Factory; hf:path/to/config.json, hf:LlamaConfig or hf:llama; recipe:OVERRIDE",
    )
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="tensor-parallel size, at least 2 (%(default)s)")
    parser.add_argument(
        "--unsplittable",
        choices=("error", "replicate"),
        default="error",
        help="what to do with linears that other sizes split but not this one (%(default)s)",
    )
    parser.add_argument(
        "--vocabulary-parallel",
        choices=_VOCABULARY_PARALLEL,
        default="auto",
        help="whether embeddings and output heads are split over the vocabulary (%(default)s: where that pays)",
    )
    parser.add_argument("--inputs", metavar="MODULE:CALLABLE", help="a callable that gives example inputs of the model")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--why", metavar="NAME", help="explain this module or parameter (* matches anything)")
    parser.add_argument(
        "--compare-tp-plan", action="store_true", help="lay the plan beside the one that transformers publishes"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the plan as YAML, for plan=FILE of the strategy"
    )
    add_config_arguments(parser)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="fields of a transformers config, or Hydra overrides: key=value",
    )


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the command. Returns 0.

    Raises:
        CommandError: bad usage, or a model that cannot be built, run or planned.
    """
    if arguments.tp < 2:
        raise InspectError(f"--tp {arguments.tp}: a model is split over at least 2 ranks.")
    # The model's own code may print; standard output is the report's.
    with contextlib.redirect_stdout(sys.stderr):
        found = _inspect(arguments, overrides)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        print_report(found)
    return 0


def _inspect(arguments: argparse.Namespace, overrides: Sequence[str]) -> Inspection:
    try:
        with opened(arguments, overrides) as subject:
            model = subject.model
            print(f"planning {type(model).__name__} for {arguments.tp} ranks ...", file=sys.stderr)
            options = SearchOptions(arguments.unsplittable, _VOCABULARY_PARALLEL[arguments.vocabulary_parallel])
            plan, sizes = search_plan(model, subject.run, arguments.tp, None, options, with_legal_sizes=True)
    except ParallelConfigError as error:
        raise InspectError(str(error)) from error
    roles = parameter_roles(model, plan)
    found = Inspection(
        model=model,
        plan=plan,
        legal_sizes=sizes,
        regions=folded_regions(plan),
        whole=folded_whole(model, plan, roles),
        explanations=explain(arguments.why, model, plan, roles) if arguments.why is not None else None,
        comparison=compare_with_tp_plan(model, plan, roles) if arguments.compare_tp_plan else None,
    )
    if arguments.save is not None:
        try:
            plan.save(arguments.save)
        except OSError as error:
            raise InspectError(f"--save {arguments.save}: the plan cannot be written: {error}") from error
        print(f"plan saved to {arguments.save}", file=sys.stderr)
    return found
