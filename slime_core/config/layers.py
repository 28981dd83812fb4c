"""Defaults < preset < YAML < custom YAML < `SLIME_*` < flags < arguments of Python: the winning entries, with origins.

`collect` returns entries still spelled as in their source. `validate` turns them into `Args`; its error messages name
the value, the place and the allowed values. A key in a file may be snake_case or kebab-case.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from slime_core.config.flag_parser import truth
from slime_core.config.flags import ParsedFlags
from slime_core.config.foreign import ForeignFlags, find_foreign, renamed
from slime_core.config.schema import Args
from slime_core.config.settings import CUSTOM_KEY, DEFAULT, FLAG, Entry, Origin, left_out
from slime_core.config.spec import flag_specs, respelled, switched_off
from slime_core.config.yaml_file import Item, read_scalar, read_yaml, rebase_marked
from slime_core.errors import ConfigError, did_you_mean
from slime_core.secrets import learn

_OTHER_ENV = (
    "SLIME_PLUGINS",
    "SLIME_TRACE_PLUGINS",
    "SLIME_CLUSTER_GPUS",
    "SLIME_HOST_IP",
    "SLIME_STARTED_BY",
)
_OTHER_ENV_BEGINS = ("SLIME_CONTRACT_", "SLIME_TEST_", "SLIME_SCRIPT_")
"""Prefixes of environment variables that other parts read; they are not settings."""

_NO_PRESET = ("config", "custom_config_path", "advantage_estimator", "plugin_dir", "no_plugins")
"""Settings read before a component is chosen, too early for the component's defaults."""


@dataclass
class Layered:
    """Winning entries, by attribute name. Sources add to it, lowest layer first."""

    values: dict[str, Entry] = field(default_factory=dict)
    foreign: dict[str, Entry] = field(default_factory=dict)
    """Entries of other programs' flags; filled by `load_settings`."""
    given: list[tuple[str, Entry]] = field(default_factory=list)
    """Other programs' settings in files, the environment and arguments, lowest layer first."""
    custom: dict[str, Entry] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    owners: Sequence[ForeignFlags] = ()
    """Owners of other programs' flags."""

    def put(self, key: str, value: object, origin: Origin, directory: str = "") -> bool:
        """Add a value under any spelling of its setting; return False if `key` is no setting and no flag.

        Args:
            key: Name with underscores.
            value: Value, spelled as in its source.
            origin: Source of the value.
            directory: Directory to which paths in the value are relative, for a value in a file.

        Raises:
            ConfigError: The value is no JSON, or neither true nor false for the opposite of a switch.
        """
        name = respelled().get(key, key)
        if name in switched_off():
            try:
                name, value = switched_off()[name], not truth(value)
            except ValueError as error:
                raise ConfigError(f"{origin.of(key)} {value!r}: {error}") from None
        if name in flag_specs():
            self.set(name, _read_text(name, Entry(flag_specs()[name].located(value, directory), origin)))
        elif find_foreign(self.owners, name):
            self.given.append((name, Entry(rebase_marked(directory, value), origin)))
        else:
            return False
        return True

    def set(self, name: str, entry: Entry) -> None:
        """Set an entry: `plugins` is merged with lower layers option by option; other settings replace theirs."""
        learn(name, entry.value)
        lower = self.values.get(name)
        if name == "plugins" and lower and isinstance(lower.value, dict) and isinstance(entry.value, dict):
            entry = Entry(_merged(lower.value, entry.value), entry.origin)
        self.values[name] = entry

    def unknown(self, name: str) -> str:
        """Return a suggestion for a key that is no setting."""
        known = [*flag_specs(), *switched_off(), *respelled(), CUSTOM_KEY]
        known += [name for owner in self.owners if not owner.prefixes for name in owner.listed.by_name]
        theirs = renamed(name)
        hint = f" It is another trainer's: {theirs}." if theirs else did_you_mean(name, known)
        return hint or f" Keys of your own go under {CUSTOM_KEY!r}: or into --custom-config-path."


def _merged(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, object]:
    out = copy.deepcopy(lower)
    for key, value in upper.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if both else copy.deepcopy(value)
    return out


def collect(
    parsed: ParsedFlags,
    env: Mapping[str, str],
    owners: Sequence[ForeignFlags],
    arguments: Mapping[str, object],
    *,
    files: bool = True,
) -> Layered:
    """Read every source; without `files`, missing files are skipped. Raises ConfigError."""
    layered = Layered(owners=owners)

    def named(name: str) -> Entry | None:
        """Return the value that an argument, a flag or a variable gives to a setting that names files."""
        variable = f"SLIME_{name.upper()}"
        if (value := _plain(arguments.get(name))) is not None:
            return Entry(value, Origin("argument", f"argument {name}"))
        if name in parsed.values or not env.get(variable, "").strip():
            return parsed.values.get(name)
        return _read_text(name, Entry(env[variable], Origin("env", variable)))

    if config := named("config"):
        for path in config.value if isinstance(config.value, list) else [config.value]:
            cited = f"--config {str(path)!r} ({config.origin})"
            if files and not os.path.exists(str(path)):
                raise ConfigError(f"{cited}: no such file; `slime init` lists those it can write")
            _add_file(layered, str(path), cited, files=files, own_keys=False)
    own = named("custom_config_path") or layered.values.get("custom_config_path")
    if own and own.value:
        cited = f"--custom-config-path {own.value!r} ({own.origin})"
        _add_file(layered, str(own.value), cited, files=files, own_keys=True)
    _read_env(layered, env)
    for name, entry in parsed.values.items():
        layered.set(name, _read_text(name, entry))
    for text in parsed.sets:
        _apply_set(layered, text)
    for name, value in arguments.items():
        plain = _plain(value)
        if plain is not None and not layered.put(name, plain, Origin("argument", f"argument {name}")):
            raise ConfigError(f"argument {name}={plain!r:.80}: no such setting.{layered.unknown(name)}")
    return layered


def _plain(value: object) -> object:
    """Convert a Python value to the schema's form: paths become text, tuples become lists."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, os.PathLike) else value


def lay_below(layered: Layered, preset: Mapping[str, Any], where: str) -> None:
    """Add a component's own defaults below all given entries. Raises ConfigError for an unknown setting.

    Args:
        layered: Entries of files, environment and flags.
        preset: Setting -> value; `plugins` is merged option by option.
        where: Origin of the defaults, e.g. "default of --advantage-estimator dapo".
    """
    for name, value in preset.items():
        if name not in flag_specs() or name in _NO_PRESET:
            raise ConfigError(f"{where}: {name!r} is no setting that it may bring.{did_you_mean(name, flag_specs())}")
        given = layered.values.get(name)
        if given is None:
            layered.values[name] = Entry(copy.deepcopy(value), Origin("preset", where))
        elif name == "plugins" and isinstance(given.value, dict):
            layered.values[name] = Entry(_merged(value, given.value), given.origin)


def _add_file(layered: Layered, path: str, cited: str, *, files: bool, own_keys: bool) -> None:
    """Add the keys of a file; with `own_keys`, unknown keys are the user's own. Raises ConfigError."""
    if not files and not os.path.isfile(path):
        layered.warnings.append(left_out(cited))
        return
    items, seen = read_yaml(path, cited), dict[str, tuple[str, str]]()
    for key, item in items.items():
        learn(key, item.value)
        if key != CUSTOM_KEY:
            _add_key(layered, key, item, seen, own=own_keys)
        elif not isinstance(item.value, dict):
            raise ConfigError(f"{item.where}: {CUSTOM_KEY!r} must be a mapping of attribute names to values.")
    for key, value in items[CUSTOM_KEY].value.items() if CUSTOM_KEY in items else ():
        _add_key(layered, str(key), replace(items[CUSTOM_KEY], value=value), seen, own=True)


def _add_key(layered: Layered, key: str, item: Item, seen: dict[str, tuple[str, str]], *, own: bool) -> None:
    """Add one entry of a file or of `--set custom.NAME`; `seen` has the settings that the file has set, by name."""
    name, origin = key.replace("-", "_"), Origin("file", item.where)
    setting = switched_off().get(name, respelled().get(name, name))
    if setting == "config" or (key == "set" and not own):
        raise ConfigError(f"{item.where}: {key!r} can only be given as a flag.")
    if setting in seen:
        other, line = seen[setting]
        raise ConfigError(f"{item.where}: {key!r} is already set as {other!r} in {line}; remove one.")
    if layered.put(name, item.value, origin, item.directory):
        seen[setting] = key, item.where
    elif not own:
        raise ConfigError(f"{item.where}: unknown setting {key!r}.{layered.unknown(name)}")
    elif hasattr(BaseModel, key):
        raise ConfigError(f"{item.where}: {key!r} cannot be an attribute of args; rename it.")
    else:
        layered.custom[key] = Entry(rebase_marked(item.directory, item.value), origin)


def _read_env(layered: Layered, env: Mapping[str, str]) -> None:
    """Add `SLIME_<NAME>` variables; an unknown name is an error if close to a setting, else a warning."""
    names = [*flag_specs(), *switched_off(), *respelled()]
    for variable in sorted(env):
        if not variable.startswith("SLIME_") or variable in _OTHER_ENV or variable.startswith(_OTHER_ENV_BEGINS):
            continue
        name = variable.removeprefix("SLIME_").lower()
        spec = flag_specs().get(respelled().get(name, name))
        if spec and not env[variable].strip() and (spec.kind == "bool" or spec.holds in ("path", "spec")):
            continue  # `SLIME_NO_PLUGINS= slime ...` is how a shell unsets one
        if layered.put(name, env[variable], Origin("env", variable)):
            continue
        if meant := did_you_mean(name, map(str.upper, names), cutoff=0.85, form="SLIME_{}"):
            raise ConfigError(f"unknown setting {variable} in the environment.{meant}")
        layered.warnings.append(f"{variable} in the environment is no setting and has no effect.")


def _read_text(name: str, entry: Entry) -> Entry:
    """Parse a list or mapping that its source gave as one string."""
    spec = flag_specs()[name]
    if not isinstance(entry.value, str) or not (spec.is_list or spec.kind == "mapping"):
        return entry
    if spec.is_list and entry.origin.kind == "file":
        return Entry([entry.value], entry.origin)
    try:
        return Entry(spec.read(entry.value), entry.origin)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{spec.flag} {entry.value!r:.200} ({entry.origin}): not valid JSON: {error}") from None


def _apply_set(layered: Layered, text: str) -> None:
    path, equals, raw = text.partition("=")
    keys = [k.strip() for k in path.split(".")]
    root = keys[0].replace("-", "_")
    specs = flag_specs()
    if not equals or not all(keys) or (root == CUSTOM_KEY and len(keys) != 2):
        raise ConfigError(f"--set {text!r} (flag): expected NAME.KEY=VALUE, e.g. plugins.math.tolerance=1e-6")
    if len(keys) == 1 and root in specs:
        raise ConfigError(f"--set {text!r} (flag): {root} is a setting of its own; use {specs[root].flag}.")
    if root == CUSTOM_KEY:
        _add_key(layered, keys[1], Item(_scalar(text, raw), f"--set {path}"), {}, own=True)
        return
    if root not in specs or specs[root].kind != "mapping":
        mappings = ", ".join(n for n, s in specs.items() if s.kind == "mapping")
        raise ConfigError(
            f"--set {text!r} (flag): {keys[0]!r} is not a mapping; for an option of a plugin write"
            f" --set plugins.{path}=... (mappings: {mappings})"
        )
    entry = layered.values.get(root)
    tree = copy.deepcopy(entry.value) if entry and isinstance(entry.value, dict) else {}
    node = tree
    for key in keys[1:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {text!r} (flag): {key!r} is not a mapping.")
    node[keys[-1]] = _scalar(text, raw)
    layered.values[root] = Entry(tree, FLAG)


def validate(layered: Layered) -> tuple[Args, dict[str, Origin]]:
    """Return typed settings and their origins. Raises ConfigError listing every value of the wrong type."""
    specs = flag_specs()
    problems = [
        f"{specs[name].flag} {entry.value!r} ({entry.origin}): must be a number"
        for name, entry in layered.values.items()
        if isinstance(entry.value, bool) and specs[name].kind in ("int", "float")
    ]
    problems += [
        f"{specs[name].flag} '' ({entry.origin}): an empty text names nothing; leave it out"
        for name, entry in layered.values.items()
        if entry.value == "" and specs[name].holds in ("path", "spec")
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        args = Args.model_validate({name: entry.value for name, entry in layered.values.items()})
    except ValidationError as error:
        raise ConfigError("\n".join(_words(layered, e) for e in error.errors())) from None
    origins = {name: layered.values[name].origin if name in layered.values else DEFAULT for name in specs}
    for extra in (layered.foreign, layered.custom):
        for name, entry in extra.items():
            setattr(args, name, entry.value)
            origins[name] = entry.origin
    return args, origins


def _words(layered: Layered, error: ErrorDetails) -> str:
    name = str(error["loc"][0])
    entry, spec = layered.values[name], flag_specs()[name]
    reason = (
        error["msg"].replace("Input should be", "must be").replace("valid integer, unable to parse string as an ", "")
    )
    if spec.kind == "mapping" and len(error["loc"]) == 2 and error["type"] == "dict_type":
        path = ".".join(map(str, error["loc"]))
        return f"{path} {error['input']!r} ({entry.origin}): must be a mapping of options, e.g. {path}.OPTION=VALUE"
    if spec.choices:
        reason = f"must be one of {', '.join(spec.choices)}"
        hint = did_you_mean(str(error["input"]), spec.choices, cutoff=0.6)
        reason += f".{hint}" if hint else ""
    elif spec.kind in ("int", "float") and error["type"].endswith("_parsing"):
        reason = "must be a whole number" if spec.kind == "int" else "must be a number"
    return f"{spec.flag} {error['input']!r} ({entry.origin}): {reason}"


def _scalar(text: str, raw: str) -> object:
    """Parse the value of `--set NAME.KEY=VALUE` as YAML."""
    try:
        return read_scalar(raw)
    except ValueError as error:
        raise ConfigError(f"--set {text!r} (flag): {error}") from None
