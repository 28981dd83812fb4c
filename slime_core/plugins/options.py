"""Options of plugins: `plugins: {NAME: {OPTION: VALUE}}` in a file, or `--set plugins.NAME.OPTION=VALUE`.

A component or hook module declares its options as a pydantic model called `Options`, and reads them typed::

    from slime_core import PluginOptions, options

    class Options(PluginOptions):
        tolerance: float = 1e-6
        '''Largest distance that counts as equal.'''

    def reward(args, sample):
        distance = options(args, "near", Options).tolerance

`Options` is an attribute of the object (of a class, or set on a function), else of the module that defines it, for all
kinds. `check_plugin_options` validates options before anything starts; `slime plugins show` prints them. A name may
stand for components of several kinds (`embedded` is an engine and a trainer). They then share one mapping, and each
reads the keys that it declares.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from slime_core.errors import ConfigError, did_you_mean
from slime_core.plugins.kinds import HOOK_GROUP, KINDS
from slime_core.plugins.registry import ComponentRef, Registry, Resolved
from slime_core.protocols import Args

logger = logging.getLogger(__name__)

_SETTINGS = ("max_turns",)
"""Options that are also settings of the run; the plugin's own value wins."""
_PER_SAMPLE = ("rewards", "generators")
"""Kinds that a row of a data set, or a component that combines others, may name."""


class PluginOptions(BaseModel):
    """Base of a plugin's `Options`: attributes with a type, a default and a docstring; any pydantic model will do."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


Model = TypeVar("Model", bound=BaseModel)


def options(args: Args | None, name: str, model: type[Model]) -> Model:
    """Return the user's options for plugin `name`, as its model with defaults filled in.

    Args:
        args: The run's settings; None, in a test, gives every option its default.
        name: The component's registered name; for a component chosen by path, the file's stem.
        model: The component's `Options`.

    Raises:
        ConfigError: An option is missing or has a wrong value; a run checks this before it starts.
    """
    given = args.plugins.get(name, {}) if args else {}
    settings = {key: getattr(args, key, None) for key in _SETTINGS}
    given = {**{k: v for k, v in settings.items() if v is not None and k in _fields(model)}, **given}
    try:
        return model.model_validate(_known(model, given))
    except ValidationError as error:
        raise ConfigError("\n".join(_words(name, "", e) for e in error.errors())) from None


def options_model(obj: object) -> type[BaseModel] | None:
    """Return the model that an object declares; None if it has no options, or unchecked options."""
    holders = [obj]
    if not isinstance(obj, ModuleType):
        holders.append(sys.modules.get(getattr(obj, "__module__", None) or type(obj).__module__))
    for holder in holders:
        found = getattr(holder, "Options", None)
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return None


def option_name(ref: ComponentRef) -> str:
    """Return the key of a component in `plugins`: its name, a file's stem, or the last part of a module's path."""
    if ref.distribution or ref.registered is not None:
        return ref.name
    place = ref.target.rpartition(":")[0] if ":" in ref.target else ref.target
    if place.endswith("/__init__.py"):
        return Path(place).parent.name
    return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]


def check_plugin_options(
    args: Args, registry: Registry, origin: str = "", used: Iterable[Resolved] | None = None
) -> None:
    """Validate every option before anything starts, and report options without effect.

    Args:
        args: The run's settings; `args.plugins` is {plugin name: {option: value}}.
        registry: The components discovered.
        origin: Where `plugins` was set, for the message.
        used: The components and hook modules of this run, loaded; None checks the names alone.

    Raises:
        ConfigError: A name is not registered; an option is unknown, missing, or has a wrong value.
    """
    place = f" ({origin})" if origin else ""
    by_name: dict[str, list[Resolved]] = {}
    for each in used or ():
        by_name.setdefault(option_name(each.ref), []).append(each)
    problems: list[str] = []
    for name in args.plugins:
        if name not in by_name:
            _check_name(name, registry, place, by_name)
            if used is not None:
                logger.warning("plugins.%s%s: %s", name, place, _unused(name, registry))
    for name, owners in by_name.items():
        given = args.plugins.get(name) or {}
        models = {model: each.ref for each in owners if (model := options_model(each.obj)) is not None}
        undeclared = dict.fromkeys(each.ref.label for each in owners if options_model(each.obj) is None)
        if not undeclared:
            problems += _unknown(name, place, given, models)
        elif given and not given.keys() <= {key for model in models for key in _fields(model)}:
            labels = " and ".join(undeclared)
            logger.warning("plugins.%s%s: not checked, since %s declares no Options", name, place, labels)
        for model in models:
            try:
                model.model_validate(_known(model, given))
            except ValidationError as error:
                problems += [_words(name, place, e) for e in error.errors()]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _check_name(name: str, registry: Registry, place: str, by_name: Mapping[str, object]) -> None:
    known = sorted({ref.name for ref in registry} | by_name.keys())
    if name in known:
        return
    hint = did_you_mean(name, known, form="plugins.{}") or " `slime plugins list` shows the names."
    raise ConfigError(
        f"plugins.{name}{place}: no plugin {name!r} is installed or in a --plugin-dir.{hint}"
        " Options of your own functions go under 'custom' or into --custom-config-path"
    )


def _unused(name: str, registry: Registry) -> str:
    refs = [ref for ref in registry if ref.name == name]
    flags = " or ".join(dict.fromkeys(f for ref in refs if ref.kind in KINDS for f in KINDS[ref.kind].flags))
    ways = f" (selected by {flags})" if flags else ""
    if any(ref.kind in _PER_SAMPLE for ref in refs):
        ways += ", unless a row of the data or another plugin chooses it"
    if any(ref.kind == HOOK_GROUP for ref in refs):
        ways = " (hook plugin that is not loaded)"
    return f"without effect, since this run uses no plugin {name!r}{ways}"


def _fields(model: type[BaseModel]) -> dict[str, str]:
    """Return accepted key -> attribute."""
    return {key: name for name, field in model.model_fields.items() for key in (name, field.alias) if key}


def _takes_any(model: type[BaseModel]) -> bool:
    return model.model_config.get("extra") == "allow"


def _known(model: type[BaseModel], given: Mapping[str, object]) -> dict[str, object]:
    fields = _fields(model)
    return {key: value for key, value in given.items() if key in fields or _takes_any(model)}


def _unknown(
    name: str, place: str, given: Mapping[str, object], models: Mapping[type[BaseModel], ComponentRef]
) -> list[str]:
    if any(_takes_any(model) for model in models):
        return []
    known = list(dict.fromkeys(key for model in models for key in _fields(model)))
    problems = []
    for key, value in given.items():
        if key in known:
            continue
        hint = did_you_mean(str(key), known, form=f"plugins.{name}.{{}}")
        hint = hint or f" Its options: {', '.join(known) or 'none'}"
        who = " and ".join(ref.label for ref in models.values())
        problems.append(f"plugins.{name}.{key} {value!r}{place}: {who} has no option {key!r}.{hint}")
    return problems


def _words(name: str, place: str, error: ErrorDetails) -> str:
    """Return one pydantic error as a slime message."""
    path = ".".join(["plugins", name, *map(str, error["loc"])])
    if error["type"] == "missing":
        return f"{path}{place}: must be given; type --set {path}=VALUE"
    reason = error["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    if error["type"].endswith("_parsing"):
        reason = reason.partition(",")[0].replace("a valid integer", "a whole number").replace("valid ", "")
    return f"{path} {error['input']!r}{place}: {reason}"
