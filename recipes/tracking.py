"""What the loggers learn about the configuration, and how tracking ends."""

from __future__ import annotations

import re
import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

SECRET_KEY = re.compile(
    r"(^|[^a-z])(token|pwd)($|[^a-z])|passw(or)?d|passphrase|secret|credential|(api|access|private)[_-]?key"
)
REDACTED = "[redacted]"


def looks_secret(key: str) -> bool:
    """Whether ``key`` names a password, a token or a key; ``max_new_tokens`` does not."""
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key)
    return SECRET_KEY.search(separated.lower()) is not None


def redact(value: Any) -> Any:
    """A copy of nested dicts and lists with every value under a secret-looking key replaced."""
    if isinstance(value, dict):
        return {key: REDACTED if looks_secret(str(key)) else redact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item) for item in value]
    return value


def loggable_config(config: DictConfig) -> dict[str, Any]:
    """The configuration as written, so that ``${oc.env:NAME}`` stays that text, with secrets redacted."""
    return redact(OmegaConf.to_container(config, resolve=False))


def finish_tracking() -> None:
    """Close the wandb run of this process, if there is one: the next job of a sweep would otherwise continue it."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()
