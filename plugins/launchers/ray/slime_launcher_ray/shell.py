"""What every actor of a run is around its stage: settings, environment, log, fingerprint, errors that can travel.

`Order` is what the driver sends; `Shell` is the base class of the actors. An actor is created at once and empty
(`Shell.__init__`), told apart (`open`), and loads its stage in a call of its own, so that all of them do so side by
side. Nothing of torch is imported here before the environment is set.
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from slime_core.errors import ConfigError, SlimeError
from slime_core.ports import PortBlock, reserve
from slime_core.secrets import Masked, learn, learn_environment
from slime_core.text import plain
from slime_core.waits import limit_user_code, start_board
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
"""Beginnings of environment variables that nodes get from the driver."""
_OF_THE_NODE = ("SLIME_HOST_IP",)
"""Those that are true of one node only."""


@dataclass(frozen=True)
class Order:
    """What an actor is told of the run: strings, from which it resolves the components itself."""

    settings: Settings
    run_dir: Path
    directory: Path
    """The driver's working directory, in which relative paths lie."""
    environment: Mapping[str, str] = field(default_factory=dict)
    carried: Carried | None = None
    """Files that Ray brings to the nodes; None: all are where they are here."""
    token: Path | None = None
    """A file that this process has written, which every actor must see."""
    inputs: tuple[Path, ...] = ()
    """Models and data, likewise."""

    @classmethod
    def of(cls, settings: Settings, run_dir: Path, carried: Carried | None = None, token: Path | None = None) -> Order:
        """The order of this process."""
        return cls(
            settings, run_dir.absolute(), Path.cwd(), environment_to_carry(), carried, token, inputs(settings.args)
        )


def environment_to_carry() -> dict[str, str]:
    """Variables that nodes get from this process."""
    return {k: v for k, v in os.environ.items() if k.startswith(_CARRIED) and k not in _OF_THE_NODE}


class _Shown(logging.Formatter):
    """As a terminal gets it."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


class _Messages(logging.Handler):
    """Keeps warnings until the driver asks for them."""

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
    """A method of an actor whose errors are of classes that the driver knows."""

    @functools.wraps(method)
    def call(*args: Any, **keywords: Any) -> T:
        try:
            return method(*args, **keywords)
        except Exception as error:
            raise as_known(error) from error

    return call


class Shell:
    """Base of the actors.

    Args:
        order: What it is told.
        name: Of this actor, as messages call it; its log is `RUN_DIR/actors/<name, words joined by ->.log`.
    """

    def __init__(self, order: Order, name: str) -> None:
        self.order = order
        self.name = name
        self.run: Prepared | None = None
        self.code: Fingerprint = {}
        """What this process has of what the settings name, once `prepare` has looked."""
        self._root = Path()
        """Of the files that Ray brought."""
        self._messages = _Messages()
        self._port: PortBlock | None = None

    def open(self, again: bool = False) -> dict[str, Any]:
        """Become this actor: log file, directory, board of waits. -> {"host", "ip", "node", "gpus", "pid", "log"}.

        Args:
            again: In the place of one that died, whose log goes on; the driver's token is no longer there.

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
            os.environ.pop(_THREADS, None)  # Ray sets it to the CPUs asked for, which are for placement
        learn("", vars(order.settings.args) | (order.settings.args.model_extra or {}))
        learn_environment(order.environment)
        start_board(order.run_dir, self.name)
        limit_user_code(order.settings.args.user_code_timeout)
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
        """Resolve what the settings name; what this process has of it."""
        import slime_core.launch  # noqa: F401 -- before torch: how OpenMP waits
        from slime_core.launch.prepare import prepare

        logger = logging.getLogger()
        to_log = logging.StreamHandler()
        to_log.setFormatter(_Shown("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(to_log)
        # Buckets of weights are read where they lie in shared memory, and engines copy them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        carried = self.order.carried
        try:
            self.run = prepare(self._local_settings(), make=False)
        except SlimeError as error:
            raise ConfigError(f"{self.name} on {socket.gethostname()}: {error}") from error
        self._messages.addFilter(lambda record: record.name.startswith("slime"))
        logger.addHandler(self._messages)  # from now on: the driver has said the same of the settings
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
        """An answer."""
        return True

    def take_messages(self) -> list[tuple[str, int, str]]:
        """Warnings since the last call: (logger, level, text)."""
        return self._messages.take()

    def free_port(self) -> int:
        """A port of this node for what this process lets listen later; nobody else gets it in between."""
        self._port = reserve()
        return self._port[0]


def log_of(run_dir: Path, name: str) -> Path:
    """Where the actor of that name writes what it prints."""
    return run_dir / FOLDER / f"{name.replace(' ', '-')}.log"


def end_quietly(call: Callable[[], object]) -> None:
    """For the way out, where another error is told already."""
    with suppress(Exception):
        call()
