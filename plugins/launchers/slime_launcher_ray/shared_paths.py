"""Whether a node sees the driver's run directory, models and data: a file just written there is looked for.

The driver calls `write_token` and `inputs`, every actor `check_shared`, before anything else, and the driver
`remove_tokens`. A directory of the same path is not enough, since every node may have one of its own.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_core.waits import waiting

PATIENCE = 10.0
"""Seconds that a network file system may take to show a new file elsewhere."""
_LOOK = 0.2
_TOKEN = ".seen-by-every-node-"
_INPUTS = ("hf_checkpoint", "load", "ref_load", "critic_load", "opd_teacher_load", "prompt_data")
"""Settings that name a model, a run or a file of rows; values of other forms name no file and are left out."""


def write_token(directory: Path) -> Path:
    """A new file in the directory, which is made if need be; its absolute path."""
    directory.mkdir(parents=True, exist_ok=True)
    token = directory.absolute() / f"{_TOKEN}{uuid.uuid4().hex[:12]}"
    token.touch()
    return token


def remove_tokens(directory: Path) -> None:
    """Every actor has looked."""
    for token in directory.glob(f"{_TOKEN}*"):
        token.unlink(missing_ok=True)


def inputs(args: Args) -> tuple[Path, ...]:
    """Models and data that the settings name and this process sees, absolute."""
    named = [Path(os.path.abspath(value)) for name in _INPUTS if isinstance(value := getattr(args, name, None), str)]
    return tuple(path for path in named if path.exists())


def check_shared(name: str, token: Path, needed: Sequence[Path] = (), patience: float = PATIENCE) -> None:
    """Look for the driver's file, and for what the driver sees.

    Args:
        name: Of this actor, for the message.
        token: What `write_token` gave.
        needed: What `inputs` gave.
        patience: Seconds to look for the file.

    Raises:
        ConfigError: This node does not see one of them.
    """
    until = time.monotonic() + patience
    with waiting(f"{token.name} of the command", deadline=patience, then="the run stops"):
        while not _is_there(token):
            if time.monotonic() >= until:
                raise ConfigError(
                    f"{name} on {socket.gethostname()}: node does not see {token}, which the command has written. The"
                    " run directory must lie on a file system that all nodes share, under the same path; --save and"
                    " --run-dir say where it is"
                )
            time.sleep(_LOOK)
    missing = [str(path) for path in needed if not path.exists()]
    if missing:
        raise ConfigError(
            f"{name} on {socket.gethostname()}: node does not see {', '.join(missing)}, which the command sees. Models"
            " and data must be on every node under the same path"
        )


def _is_there(token: Path) -> bool:
    try:
        os.listdir(token.parent)  # makes a network file system look again
    except OSError:
        return False
    return token.is_file()
