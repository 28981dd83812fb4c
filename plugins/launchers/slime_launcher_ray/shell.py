"""The common part of all actors of a run: settings, environment, log, fingerprint, serializable errors.

The driver sends an `Order`; `Shell` is the base class of the actors. An actor is first created empty (`Shell.__init__`)
and then initialized (`open`). A separate call loads its stage, so that all actors load in parallel. This module does
not import torch before the environment is set.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from slime_engine_http.ports import PortBlock, reserve

from slime_core.errors import ConfigError, SlimeError
from slime_core.secrets import Masked, learn, learn_environment
from slime_core.text import plain
from slime_core.waits import published
from slime_launcher_ray.carried import Carried, root_of
from slime_launcher_ray.fingerprint import Fingerprint, fingerprint
from slime_launcher_ray.shared_paths import check_shared, inputs
from slime_launcher_ray.wait import as_known

if TYPE_CHECKING:
    from slime_core.config import Settings
    from slime_core.launch.prepare import Prepared

T = TypeVar("T")
FOLDER = "actors"
"""Folder of the run directory with the output of every actor."""
_MOST_MESSAGES = 100
_THREADS = "OMP_NUM_THREADS"
_CARRIED = ("SLIME_", "OMP_", "MKL_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "NCCL_", "GLOO_", "TORCH_", "CUBLAS_")
"""Prefixes of environment variables that the driver sends to the nodes."""
_OF_THE_NODE = ("SLIME_HOST_IP",)
"""Environment variables that differ between nodes and are not sent."""


@dataclass(frozen=True)
class Order:
    """The description of the run for an actor, as strings from which the actor resolves the components."""

    settings: Settings
    run_dir: Path
    directory: Path
    """Working directory of the driver, the base of relative paths."""
    environment: Mapping[str, str] = field(default_factory=dict)
    carried: Carried | None = None
    """Files that Ray copies to the nodes; None if the nodes see all files under the driver's paths."""
    token: Path | None = None
    """File written by the driver, which every actor must see."""
    inputs: tuple[Path, ...] = ()
    """Models and data, which every actor must see."""

    @classmethod
    def of(cls, settings: Settings, run_dir: Path, carried: Carried | None = None, token: Path | None = None) -> Order:
        """Build the order in the driver's process."""
        return cls(
            settings, run_dir.absolute(), Path.cwd(), environment_to_carry(), carried, token, inputs(settings.args)
        )


def environment_to_carry() -> dict[str, str]:
    """Return the environment variables that this process sends to the nodes."""
    return {k: v for k, v in os.environ.items() if k.startswith(_CARRIED) and k not in _OF_THE_NODE}


class _Shown(logging.Formatter):
    """A formatter that prints records as the terminal shows them."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


class _Messages(logging.Handler):
    """A handler that keeps warnings until the driver fetches them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[tuple[str, int, str]] = []
        self.left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.kept) < _MOST_MESSAGES:
            self.kept.append((record.name, record.levelno, self.format(record)))
        else:
            self.left_out += 1

    def take(self) -> list[tuple[str, int, str]]:
        kept, self.kept = self.kept, []
        if self.left_out:
            kept.append((__name__, logging.WARNING, f"... and {self.left_out} more in its log"))
            self.left_out = 0
        return kept


def travels(method: Callable[..., T]) -> Callable[..., T]:
    """Wrap an actor's method so that it raises only error classes that the driver has."""

    @functools.wraps(method)
    def call(*args: Any, **keywords: Any) -> T:
        try:
            return method(*args, **keywords)
        except Exception as error:
            raise as_known(error) from error

    return call


class Shell:
    """Base class of the actors.

    Args:
        order: Description of the run.
        name: Name of the actor in messages; its log is `RUN_DIR/actors/<name, words joined by ->.log`.
    """

    def __init__(self, order: Order, name: str) -> None:
        self.order = order
        self.name = name
        self.run: Prepared | None = None
        self.code: Fingerprint = {}
        """Fingerprint of the code and files named by the settings, set by `prepare`."""
        self._root = Path()
        """Directory of the files that Ray copied."""
        self._messages = _Messages()
        self._port: PortBlock | None = None
        self._published: AbstractContextManager[None] = nullcontext()

    def open(self, again: bool = False) -> dict[str, Any]:
        """Set up log file, directory and board of waits; return {"host", "ip", "node", "gpus", "pid", "log"}.

        Args:
            again: True if the actor replaces a dead one and continues its log; the driver's token no longer exists.

        Raises:
            ConfigError: The node does not have the driver's directories.
        """
        order = self.order
        if order.carried is not None:
            self._root = root_of(order.carried)  # before the directory changes
        if order.token is not None and not again:
            check_shared(self.name, order.token, order.inputs)
        try:
            os.chdir(order.directory)
            log = log_of(order.run_dir, self.name)
            log.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{self.name} on {socket.gethostname()}: {error}; every node must see the working directory and the run"
                " directory of the command under the same path"
            ) from error
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)
        sys.stdout, sys.stderr = Masked(sys.stdout), Masked(sys.stderr)
        os.environ.update(self._local_environment())
        if _THREADS not in order.environment:
            os.environ.pop(_THREADS, None)  # Ray sets it to the requested CPUs, which are meant for placement
        learn("", vars(order.settings.args) | (order.settings.args.model_extra or {}))
        learn_environment(order.environment)
        self._published = published(order.settings.args, self.name)
        self._published.__enter__()  # until the process ends
        context = ray.get_runtime_context()
        return {
            "host": socket.gethostname(),
            "ip": ray.util.get_node_ip_address(),
            "node": context.get_node_id(),
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
            "pid": os.getpid(),
            "log": str(log),
        }

    def set_environment(self, variables: Mapping[str, str]) -> None:
        """Set environment variables of this process."""
        os.environ.update(variables)

    def prepare(self) -> Fingerprint:
        """Resolve the components of the settings; return the fingerprint of this process's code and files."""
        import slime_core.launch  # noqa: F401 -- before torch: how OpenMP waits
        from slime_core.launch.prepare import prepare

        logger = logging.getLogger()
        to_log = logging.StreamHandler()
        to_log.setFormatter(_Shown("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(to_log)
        # Buckets of weights are read in place in shared memory, and engines copy them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        carried = self.order.carried
        try:
            self.run = prepare(self._local_settings(), make=False)
        except SlimeError as error:
            raise ConfigError(f"{self.name} on {socket.gethostname()}: {error}") from error
        self._messages.addFilter(lambda record: record.name.startswith("slime"))
        logger.addHandler(self._messages)  # only from here: the driver has already logged the warnings about settings
        self.code = fingerprint(self.run.plugins, carried.originally(self._root) if carried is not None else {})
        return self.code

    def _local_settings(self) -> Settings:
        settings, carried = self.order.settings, self.order.carried
        if carried is not None:
            settings = dataclasses.replace(settings, args=carried.localized(settings.args, self._root))
        return settings

    def _local_environment(self) -> Mapping[str, str]:
        variables, carried = self.order.environment, self.order.carried
        return variables if carried is None else carried.localized_environment(variables, self._root)

    @property
    def prepared(self) -> Prepared:
        """The resolved run."""
        assert self.run is not None, "prepare() comes first"
        return self.run

    def alive(self) -> bool:
        """Return True, as a sign of life."""
        return True

    def take_messages(self) -> list[tuple[str, int, str]]:
        """Return the warnings since the last call: (logger, level, text)."""
        return self._messages.take()

    def free_port(self) -> int:
        """Return a port of this node, reserved for a later listener of this process."""
        self._port = reserve()
        return self._port[0]


def log_of(run_dir: Path, name: str) -> Path:
    """Return the log file of the actor with this name."""
    return run_dir / FOLDER / f"{name.replace(' ', '-')}.log"


def end_quietly(call: Callable[[], object]) -> None:
    """Call and ignore errors, for cleanup after another error."""
    with suppress(Exception):
        call()
