"""Read models and their server groups from a `--sglang-config` file, with all checks that need only the file.

Example::

    sglang:
      - name: actor                    # receives weights: model_path is --hf-checkpoint
        server_groups:                 # or engine_groups
          - {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 2}
          - {worker_type: decode, num_gpus: 4, overrides: {mem_fraction_static: 0.8}}
      - name: judge
        model_path: /models/judge
        server_groups: [{num_gpus: 2}]

`planner.make_plan` calls `read_models` and compares the result with the flags. The order of groups is the order of
GPUs, not the order in which servers start.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from slime_core.config.yaml_file import Document, Item, read_document
from slime_core.errors import ConfigError, did_you_mean

Count = Annotated[StrictInt, Field(gt=0)]
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_GROUPS = ("server_groups", "engine_groups")
Keys = tuple[Any, ...]
"""Keys of mappings and numbers of list entries that lead to an entry of the file."""


class _Entry(BaseModel):
    model_config = ConfigDict(protected_namespaces=(), use_attribute_docstrings=True)

    _where: str = ""

    @property
    def where(self) -> str:
        """Return "file:line", or the flag that the entry replaces."""
        return self._where

    def at(self, where: str) -> Self:
        """Store the entry's place in the file."""
        self._where = where
        return self


E = TypeVar("E", bound=_Entry)


class ServerGroup(_Entry):
    """Servers of one kind and size."""

    worker_type: Literal["regular", "prefill", "decode", "encoder", "placeholder"] = "regular"
    num_gpus: Count
    """Number of GPUs of the whole group."""
    num_gpus_per_engine: Count | None = None
    """GPUs per engine; by default the model's value, else --rollout-num-gpus-per-engine."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """`ServerArgs` field -> value, on top of --sglang-*."""


class ModelEntry(_Entry):
    """A model and its server groups."""

    name: StrictStr
    model_path: StrictStr | None = None
    """Path of the model; by default --hf-checkpoint."""
    update_weights: StrictBool | None = None
    """True if the model receives the trainer's weights; by default, True if `model_path` is --hf-checkpoint."""
    num_gpus_per_engine: Count | None = None
    server_groups: list[ServerGroup] = Field(default_factory=list)

    @property
    def serves(self) -> bool:
        """Return True if the group has servers, not only reserved GPUs."""
        return any(group.worker_type != "placeholder" for group in self.server_groups)


def read_models(path: str, cited: str) -> list[ModelEntry]:
    """Return the models of a file, in its order.

    Args:
        path: The file.
        cited: Name of the file in messages if it cannot be read: `--sglang-config 'x.yaml' (flag)`.

    Raises:
        ConfigError: The file is not readable, or is wrong with any flags; the message has file and line.
    """
    document = read_document(path, cited)
    for key, item in document.items().items():
        if key != "sglang":
            raise ConfigError(f"{item.where}: unknown key {key!r}; expected one key, 'sglang', with a list of models.")
    listed = _list(document, ("sglang",), path, "'sglang' must be a list of models")
    models = [_model(document, keys) for keys in listed]
    seen: dict[str, str] = {}
    for model in models:
        if model.name in seen:
            raise ConfigError(
                f"{model.where}: model {model.name!r} is already at {seen[model.name]}; names must differ."
            )
        seen[model.name] = model.where
    if not any(model.serves for model in models):
        raise ConfigError(f"{path}: every server group is a placeholder; nothing would answer.")
    return models


def _model(document: Document, keys: Keys) -> ModelEntry:
    where, items = document.where(*keys), document.items(*keys)
    given = [key for key in _GROUPS if key in items]
    if len(given) == 2:
        raise ConfigError(f"{items[given[1]].where}: server_groups and engine_groups are the same; use one.")
    _check_keys(items, ModelEntry, ("engine_groups",), "model")
    plain = {key: item for key, item in items.items() if key not in _GROUPS}
    model = _validate(ModelEntry, plain, where, "a model needs a 'name'")
    if not _NAME.match(model.name):
        raise ConfigError(f"{plain['name'].where}: name {model.name!r}: letters, digits and . _ - only, please.")
    groups = (*keys, given[0]) if given else None
    message = f"model {model.name!r} needs 'server_groups', a list such as [{{num_gpus: 1}}]"
    model.server_groups = [_group(document, item) for item in _list(document, groups, where, message)]
    _check_paths(model)
    check_worker_types(model)
    return model


def _group(document: Document, keys: Keys) -> ServerGroup:
    where, items = document.where(*keys), document.items(*keys)
    _check_keys(items, ServerGroup, (), "server group")
    group = _validate(ServerGroup, items, where, "a server group needs 'num_gpus'")
    if group.worker_type == "placeholder" and (group.overrides or group.num_gpus_per_engine):
        useless = "overrides" if group.overrides else "num_gpus_per_engine"
        raise ConfigError(f"{items[useless].where}: a placeholder only reserves GPUs; remove {useless!r}.")
    return group


def _check_paths(model: ModelEntry) -> None:
    """Check that each `model_path` in a group's overrides equals the model's own path."""
    for group in model.server_groups:
        for key in ("model_path", "model-path"):
            path = group.overrides.pop(key, None)
            if path is None:
                continue
            if model.model_path is None and group is model.server_groups[0]:
                model.model_path = str(path)
            if path != model.model_path:
                raise ConfigError(
                    f"{group.where}: model_path {path!r} differs from {model.model_path or '--hf-checkpoint'!r}, which"
                    f" model {model.name!r} serves; all groups of a model serve the same, so set the model's"
                    " 'model_path', or make another model."
                )


def check_worker_types(model: ModelEntry) -> None:
    """Raise ConfigError for an invalid mix of worker types.

    Prefill and decode need each other, neither may be combined with regular, and encoders need other servers.
    """
    kinds = {group.worker_type for group in model.server_groups}
    if ("prefill" in kinds) != ("decode" in kinds):
        there, lacking = ("prefill", "decode") if "prefill" in kinds else ("decode", "prefill")
        raise ConfigError(f"{model.where}: model {model.name!r} has {there} servers and needs {lacking} servers, too.")
    if {"regular", "prefill"} <= kinds:
        raise ConfigError(
            f"{model.where}: model {model.name!r} has regular servers beside prefill and decode, which its one router"
            " cannot serve; make them another model."
        )
    if kinds - {"placeholder"} == {"encoder"}:
        raise ConfigError(
            f"{model.where}: model {model.name!r} has only encoder servers; add regular, or prefill and decode, ones."
        )


# -- entries of the file ---------------------------------------------------------------------------------------


def _list(document: Document, keys: Keys | None, where: str, message: str) -> list[Keys]:
    """Return the keys of each mapping in a non-empty list. Raises ConfigError with `message` otherwise."""
    found = document.value
    for key in keys or ():
        found = found.get(key) if isinstance(found, dict) else found and found[key]
    if keys is None or not isinstance(found, list) or not found:
        raise ConfigError(f"{document.where(*keys) if keys and found is not None else where}: {message}.")
    for number, item in enumerate(found):
        if not isinstance(item, dict):
            raise ConfigError(f"{document.where(*keys, number)}: {message}.")
    return [(*keys, number) for number in range(len(found))]


def _check_keys(items: dict[str, Item], entry: type[_Entry], aliases: Sequence[str], what: str) -> None:
    known = [*entry.model_fields, *aliases]
    for key, item in items.items():
        if key not in known:
            hint = did_you_mean(key, known) or f" Known: {', '.join(known)}."
            raise ConfigError(f"{item.where}: unknown key {key!r} of a {what}.{hint}")


def _validate(entry: type[E], items: dict[str, Item], where: str, needs: str) -> E:
    """Validate and return the entry at `where`; `needs` names its only required key."""
    try:
        return entry.model_validate({key: item.value for key, item in items.items()}).at(where)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        if key not in items:
            raise ConfigError(f"{where}: {needs}.") from None
        reason = first["msg"].replace("Input should be", "must be")
        raise ConfigError(f"{items[key].where}: {key} {items[key].value!r}: {reason}.") from None
