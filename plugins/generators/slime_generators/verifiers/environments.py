"""Build an environment of the verifiers package from options, with its tasks as rows and the servers of its episodes.

The generator, the data source and the recipe use it. If neither the environment's author nor the user chose a program
or a place for a seat, the seat gets this distribution's chat harness on this machine. The defaults of verifiers are a
program that `uv` installs, and a paid sandbox.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from slime_core.errors import ConfigError
from slime_core.waits import waiting

CHAT = "slime_verifiers_chat"
"""Id of the harness in this distribution."""


def load(spec: str) -> Any:
    """Return a new environment for a spec in JSON: {"id", "taskset", "config"}. Raises ConfigError."""
    try:
        from pydantic import ValidationError
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise ConfigError('verifiers needs its package; type pip install "slime-rl[verifiers]"') from error
    facts = json.loads(spec)
    named = facts["taskset"]["id"]
    try:
        config_class = loaders.env_config_type(named, facts["id"])
        roles = _roles(config_class, facts["config"], loaders.default_harness_id(named) == "bash")
        config = {**facts["config"], **roles, "id": facts["id"], "taskset": facts["taskset"]}
        return loaders.load_environment(loaders.resolve_env_config(config))
    except (ImportError, AttributeError, TypeError, ValueError, ValidationError) as error:
        raise ConfigError(f"plugins.verifiers.env {named!r}: {type(error).__name__}: {error}") from error


environment_of = functools.lru_cache(maxsize=16)(load)
"""Cached environment to read tasks from; environments that play belong to an event loop each, see `served`."""


def _roles(config_class: Any, given: Mapping[str, Any], without_harness: bool) -> dict[str, Any]:
    """Return each seat's configuration, with this distribution's harness and this machine as defaults."""
    from verifiers.v1.configs.agent import AgentConfig

    roles = {}
    for name, field in config_class.model_fields.items():
        if not isinstance(field.default, AgentConfig):
            continue
        role = dict(given.get(name) or {})
        if without_harness and field.default.harness is None:
            role.setdefault("harness", {"id": CHAT})
        if "runtime" not in field.default.model_fields_set:
            role.setdefault("runtime", {"type": "subprocess"})
        roles[name] = role
    return roles


class TaskRows:
    """Tasks of an environment as rows, all made when it is built (`slime_core.data.dataset.Rows`)."""

    def __init__(self, spec: Mapping[str, Any], select: Mapping[str, Any], columns: Mapping[str, str]) -> None:
        """
        Args:
            spec: As for `environment_of`.
            select: Fields of verifiers' SelectConfig: include, exclude, shuffle, seed, skip, limit.
            columns: What the row's "input" and "metadata" are called.

        Raises:
            ConfigError: There is no such environment, it has no task, or `select` is wrong.
        """
        environment = environment_of(json.dumps(spec, sort_keys=True))
        from pydantic import ValidationError
        from verifiers.v1.configs.select import SelectConfig

        self._facts = {"spec": dict(spec), "select": dict(select), "version": metadata.version("verifiers")}
        self.path = Path(f"verifiers-{spec['taskset']['id']}")
        try:
            view = environment.taskset.select(SelectConfig.model_validate(select))
        except (ValidationError, ValueError) as error:
            raise ConfigError(f"plugins.verifiers.select: {error}") from error
        if not view.bounded:
            raise ConfigError(
                f"plugins.verifiers.select: {spec['taskset']['id']!r} has tasks without end; give select.limit"
            )
        self._rows = [_row(task, columns) for task in view]
        if not self._rows:
            raise ConfigError(f"plugins.verifiers.select: no task of {spec['taskset']['id']!r} is left")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    def where(self, index: int) -> str:
        """Return the name of a row for messages."""
        return f"{self.path}, task {index}"

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts that a resumed run compares: environment, selection, version of verifiers, and the tasks."""
        text = json.dumps([self._facts, self._rows], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return {"path": str(self.path), "size": len(text), "num_rows": len(self), "sha256": digest}

    def close(self) -> None:
        """Do nothing, since no file is open."""


def _row(task: Any, columns: Mapping[str, str]) -> dict[str, Any]:
    data = task.data.model_dump(mode="json", exclude_none=True)
    prompt = data.get("prompt")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
    if data.get("system_prompt"):
        messages.insert(0, {"role": "system", "content": data["system_prompt"]})
    shown = "\n".join(str(message["content"]) for message in messages) or str(data.get("name") or f"task {data['idx']}")
    return {columns["input"]: shown, columns["metadata"]: {"verifiers": {"task": data}}}


def task_of(environment: Any, data: Mapping[str, Any]) -> Any:
    """Return the task of a row, as the environment's taskset makes it."""
    kind = type(environment.taskset).task_type()
    return kind(kind.data_type().model_validate(data), environment.taskset.config.task)


@asynccontextmanager
async def served(spec: str) -> AsyncIterator[Any]:
    """Yield the environment with running servers; the first user starts them, the last one stops them."""
    places = _places.setdefault(asyncio.get_running_loop(), {})
    if spec not in places:
        places[spec] = _Place(spec)
    place = places[spec]
    serving = place.serving
    if serving is None:
        serving = place.serving = _Serving(place)
    serving.users += 1
    try:
        with waiting("the servers of a verifiers environment", deadline=None, then="the sample's deadline ends it"):
            await asyncio.shield(serving.ready)
        yield place.environment
    finally:
        serving.users -= 1
        if not serving.users:
            if place.serving is serving:
                place.serving = None
            serving.leave.set()
            with waiting("the end of a verifiers environment's servers", deadline=None, then="verifiers ends them"):
                await asyncio.gather(serving.task, return_exceptions=True)


class _Place:
    """An environment of an event loop. Its servers are attributes, so they are never started twice at a time."""

    def __init__(self, spec: str) -> None:
        self.environment = load(spec)
        self.lock = asyncio.Lock()
        self.serving: _Serving | None = None


class _Serving:
    """An environment inside `serving()`, which must be entered and left in the same task."""

    def __init__(self, place: _Place) -> None:
        self.users = 0
        self.leave = asyncio.Event()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.ensure_future(self._serve(place))

    async def _serve(self, place: _Place) -> None:
        try:
            with waiting("users of a verifiers environment", deadline=None, then="the last one ends it"):
                async with place.lock, place.environment.serving():
                    self.ready.set_result(None)
                    await self.leave.wait()
        except BaseException as error:
            if not self.ready.done():
                self.ready.set_exception(error)
            raise


_places: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Place]] = WeakKeyDictionary()
