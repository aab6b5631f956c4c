"""Command-line overrides that fit no configuration: told in words, with the near misses, before a Hydra app starts."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf

from lightning_tp.errors import ParallelConfigError


class UnknownOverrideError(ParallelConfigError):
    """An override names a key, a group or an option that the configuration does not have."""


def check_overrides(
    config_dir: Path, config_name: str, overrides: Sequence[str], search_path: Sequence[str] = ()
) -> None:
    """Check that every override of a Hydra command line names something that exists.

    Args:
        config_dir: directory of the primary configuration.
        config_name: name of the primary configuration.
        overrides: as typed, sweeps included; every swept option is checked.
        search_path: further configuration directories.

    Raises:
        UnknownOverrideError: naming the first override that fits nothing, and what it may have meant.
        CompactHydraException: for what else is wrong with the configuration or the syntax of an override.
    """
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        parsed = OverridesParser.create(loader).parse_overrides(list(overrides))
        extra = [f"hydra.searchpath=[{','.join(search_path)}]"] if search_path else []
        groups: list[list[str]] = []
        values: list[Override] = []
        for override in parsed:
            options = group_options(loader, config_name, override, extra)
            if options:
                groups.append(selections(override, options))
            else:
                values.append(override)
        for chosen in itertools.product(*groups):
            config = compose(config_name, overrides=[*extra, *chosen], return_hydra_config=True)
            for override in values:
                check_key(config, override, group_names(loader))


def group_options(loader: ConfigLoader, config_name: str, override: Override, extra: list[str]) -> list[str]:
    """Options of the group that ``override`` selects from; empty if it sets a value."""
    if "." in override.key_or_group:
        return []
    return loader.get_group_options(override.key_or_group, config_name=config_name, overrides=extra)


def group_names(loader: ConfigLoader) -> list[str]:
    return [group for group in loader.list_groups("") if group != "hydra"]


def selections(override: Override, options: list[str]) -> list[str]:
    """The single choices, as overrides, of an override that may sweep over several options of a group."""
    assert override.input_line is not None
    if override.is_delete() or override.value() is None:
        return [override.input_line]
    name = override.input_line.partition("=")[0]
    texts = (
        list(override.sweep_string_iterator())
        if override.is_sweep_override()
        else [override.get_value_element_as_str()]
    )
    for text in texts:
        for option in text.strip("[]").split(","):
            if option not in options:
                raise UnknownOverrideError(
                    f"{override.input_line}: the group '{override.key_or_group}' has no option '{option}'."
                    f"{did_you_mean(option, options)} Its options: {', '.join(sorted(options))}."
                )
    return [f"{name}={text}" for text in texts]


def check_key(config: DictConfig, override: Override, groups: list[str]) -> None:
    """Raise unless ``override`` adds a key or names one of ``config``."""
    assert override.input_line is not None
    if override.is_add() or override.is_force_add():
        return
    key = override.key_or_group
    keys = list(dotted_keys(config))
    absent = object()
    # A key may also lead through a list or an interpolation.
    if key in keys or OmegaConf.select(config, key, default=absent, throw_on_resolution_failure=False) is not absent:
        return
    group = key.partition(".")[0]
    choice = config.hydra.runtime.choices.get(group)
    where = f"the configuration with {group}={choice}" if choice else "the configuration"
    add = "" if override.is_delete() else f" To add a new key on purpose, write +{override.input_line}"
    raise UnknownOverrideError(
        f"{override.input_line}: {where} has no key or group '{key}'.{did_you_mean(key, [*keys, *groups])}{add}"
    )


def dotted_keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every key of ``config``, inner nodes included, as ``outer.inner``. Interpolations are not followed."""
    for name in map(str, config):
        key = f"{prefix}{name}"
        yield key
        if OmegaConf.is_missing(config, name) or OmegaConf.is_interpolation(config, name):
            continue
        if OmegaConf.is_dict(config[name]):
            yield from dotted_keys(config[name], f"{key}.")


def did_you_mean(wrong: str, names: Sequence[str]) -> str:
    """A question with up to three of ``names`` that resemble ``wrong``; a ``wrong`` without dots may be a last part."""
    near = difflib.get_close_matches(wrong, names)
    if "." not in wrong:
        by_last_part: dict[str, list[str]] = {}
        for name in names:
            by_last_part.setdefault(name.rpartition(".")[2], []).append(name)
        for last_part in difflib.get_close_matches(wrong, by_last_part):
            near += by_last_part[last_part]
    # Hydra's own keys are many, and rarely what was meant.
    near = [name for name in dict.fromkeys(near) if wrong.startswith("hydra") or not name.startswith("hydra.")][:3]
    return f" Did you mean {', '.join(near)}?" if near else ""


def explain_overrides(config_dir: Path, config_name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorate a ``hydra.main`` function: an unknown override ends the program with one message and exit status 1.

    The check runs before Hydra, so that a sweep with one misspelt option does not start at all.
    """

    def decorate(app: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(app)
        def checked() -> None:
            args = get_args_parser().parse_args()
            directory = config_dir
            if args.config_path is not None:
                # As Hydra does: relative to the file of the app.
                directory = Path(inspect.getfile(inspect.unwrap(app))).parent / args.config_path
            search_path = [] if args.config_dir is None else [f"file://{Path(args.config_dir).resolve()}"]
            # What Hydra finds by itself it also says by itself, when the app starts.
            with plain_errors(), suppress(CompactHydraException):
                check_overrides(directory.resolve(), args.config_name or config_name, args.overrides, search_path)
            app()

        return checked

    return decorate


@contextmanager
def plain_errors() -> Iterator[None]:
    """End the program with the message alone, status 1, if a configuration does not fit; other errors pass through."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ParallelConfigError):
            cause = cause.__cause__
        if cause is None:
            raise
        sys.exit(f"error: {cause}")
