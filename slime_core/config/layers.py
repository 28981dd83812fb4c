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

from slime_core.config.flag_parser import truth
from slime_core.config.flags import ParsedFlags
from slime_core.config.foreign import ForeignFlags, find_foreign, renamed
from slime_core.config.origins import DEFAULT, FLAG, Entry, Origin
from slime_core.config.schema import Args
from slime_core.config.settings import CUSTOM_KEY, left_out
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
    """Winning entries, by attribute name."""

    values: dict[str, Entry] = field(default_factory=dict)
    foreign: dict[str, Entry] = field(default_factory=dict)
    """Entries of other programs' flags; filled by `load_settings`."""
    given: list[tuple[str, Entry]] = field(default_factory=list)
    """Other programs' settings in files and the environment, lowest layer first."""
    custom: dict[str, Entry] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add_mapping_entry(self, name: str, entry: Entry) -> None:
        """Set an entry: `plugins` is merged with lower layers option by option; other settings replace theirs."""
        learn(name, entry.value)
        lower = self.values.get(name)
        if name == "plugins" and lower and isinstance(lower.value, dict) and isinstance(entry.value, dict):
            entry = Entry(_merged(lower.value, entry.value), entry.origin)
        self.values[name] = entry


def _merged(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    out = copy.deepcopy(lower)
    for key, value in upper.items():
        if isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = _merged(out[key], value)
        else:
            out[key] = copy.deepcopy(value)
    return out


def collect(
    parsed: ParsedFlags,
    env: Mapping[str, str],
    foreign: Sequence[ForeignFlags],
    arguments: Mapping[str, Any] | None = None,
    *,
    files: bool = True,
) -> Layered:
    """Read every source; without `files`, missing files are skipped. Raises ConfigError."""
    layered = Layered()
    from_env, foreign_env = read_env(env, layered.warnings, foreign)
    upper = Layered()
    for name, value in (arguments or {}).items():
        _add_argument(upper, name, value, foreign)
    named = upper.values.get("config") or parsed.values.get("config") or from_env.get("config")
    if named:
        for path in map(str, named.value if isinstance(named.value, list) else [named.value]):
            cited = f"--config {path!r} ({named.origin})"
            if files and not os.path.exists(path):
                raise ConfigError(f"{cited}: no such file; `slime init` lists those it can write")
            if _is_there(layered, path, cited, files=files):
                _add_file(layered, path, foreign, cited=cited, open_keys=False)
    layers = (upper.values, parsed.values, from_env, layered.values)
    custom = next((values["custom_config_path"] for values in layers if "custom_config_path" in values), None)
    if custom and custom.value:
        cited = f"--custom-config-path {custom.value!r} ({custom.origin})"
        if _is_there(layered, str(custom.value), cited, files=files):
            _add_file(layered, str(custom.value), foreign, cited=cited, open_keys=True)
    for entries in (from_env, parsed.values):
        for name, entry in entries.items():
            layered.add_mapping_entry(name, _read_text(name, entry))
    layered.given += foreign_env
    for text in parsed.sets:
        _apply_set(layered, text)
    for name, entry in upper.values.items():
        layered.add_mapping_entry(name, entry)
    layered.given += upper.given
    return layered


def _add_argument(layered: Layered, name: str, value: Any, foreign: Sequence[ForeignFlags]) -> None:
    """Add a keyword argument of Python as the top layer; None leaves the setting to the other layers."""
    origin = Origin("argument", f"argument {name}")
    if value is None:
        return
    value = _plain(value)
    if (meant := respelled().get(name, name)) in flag_specs():
        layered.add_mapping_entry(meant, _read_text(meant, Entry(value, origin)))
    elif name in switched_off() and isinstance(value, bool):
        layered.values[switched_off()[name]] = Entry(not value, origin)
    elif find_foreign(foreign, name):
        layered.given.append((name, Entry(value, origin)))
    else:
        raise ConfigError(f"argument {name}={value!r:.80}: no such setting.{_suggest_key(name, foreign)}")


def _plain(value: Any) -> Any:
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


def _is_there(layered: Layered, path: str, cited: str, *, files: bool) -> bool:
    """Return whether to read a file; add a warning if it is skipped."""
    if files or os.path.isfile(path):
        return True
    layered.warnings.append(left_out(cited))
    return False


def _add_file(layered: Layered, path: str, foreign: Sequence[ForeignFlags], *, cited: str, open_keys: bool) -> None:
    items = read_yaml(path, cited)
    for key, item in items.items():
        learn(key, item.value)
    _refuse_repeats(items, foreign)
    for key, item in items.items():
        _add_file_key(layered, key, item, foreign, open_keys=open_keys)


def _refuse_repeats(items: Mapping[str, Item], foreign: Sequence[ForeignFlags]) -> None:
    """Raise ConfigError if a file sets a setting twice, in any of its spellings."""
    pairs = [(key, item.where) for key, item in items.items()]
    if CUSTOM_KEY in items and isinstance(items[CUSTOM_KEY].value, dict):
        pairs += [(str(key), items[CUSTOM_KEY].where) for key in items[CUSTOM_KEY].value]
    seen: dict[str, tuple[str, str]] = {}
    for key, where in pairs:
        name = key.replace("-", "_")
        name = switched_off().get(name, respelled().get(name, name))
        if name not in flag_specs() and not find_foreign(foreign, name):
            continue
        if name in seen:
            other, line = seen[name]
            raise ConfigError(f"{where}: {key!r} is already set as {other!r} in {line}; remove one.")
        seen[name] = key, where


def _add_file_key(layered: Layered, key: str, item: Item, foreign: Sequence[ForeignFlags], *, open_keys: bool) -> None:
    name, origin = key.replace("-", "_"), Origin("file", item.where)
    name = respelled().get(name, name)
    if name in ("config", "set"):
        raise ConfigError(f"{item.where}: {key!r} can only be given as a flag.")
    if name in flag_specs():
        value = flag_specs()[name].located(item.value, item.directory)
        layered.add_mapping_entry(name, _read_text(name, Entry(value, origin)))
    elif name in switched_off():
        if not isinstance(item.value, bool):
            raise ConfigError(f"{item.where}: {key} {item.value!r}: expected true or false")
        layered.values[switched_off()[name]] = Entry(not item.value, origin)
    elif name == CUSTOM_KEY:
        if not isinstance(item.value, dict):
            raise ConfigError(f"{item.where}: {CUSTOM_KEY!r} must be a mapping of attribute names to values.")
        for custom_key, value in item.value.items():
            _add_custom(layered, str(custom_key), replace(item, value=value), foreign)
    elif find_foreign(foreign, name):
        layered.given.append((name, Entry(rebase_marked(item.directory, item.value), origin)))
    elif open_keys:
        _add_custom(layered, key, item, foreign)
    else:
        raise ConfigError(f"{item.where}: unknown setting {key!r}.{_suggest_key(name, foreign)}")


def _add_custom(layered: Layered, key: str, item: Item, foreign: Sequence[ForeignFlags]) -> None:
    name = key.replace("-", "_")
    if name in flag_specs() or name in switched_off() or name in respelled() or find_foreign(foreign, name):
        _add_file_key(layered, key, item, foreign, open_keys=False)
    elif hasattr(BaseModel, key):
        raise ConfigError(f"{item.where}: {key!r} cannot be an attribute of args; rename it.")
    else:
        value = rebase_marked(item.directory, item.value)
        layered.custom[key] = Entry(value, Origin("file", item.where))


def _suggest_key(name: str, foreign: Sequence[ForeignFlags]) -> str:
    known = [*flag_specs(), *switched_off(), *respelled(), CUSTOM_KEY]
    known += [name for owner in foreign if not owner.prefixes for name in owner.listed.by_name]
    theirs = renamed(name)
    hint = f" It is another trainer's: {theirs}." if theirs else did_you_mean(name, known)
    return hint or f" Keys of your own go under {CUSTOM_KEY!r}: or into --custom-config-path."


def read_env(
    env: Mapping[str, str], warnings: list[str], foreign: Sequence[ForeignFlags] = ()
) -> tuple[dict[str, Entry], list[tuple[str, Entry]]]:
    """Read entries from `SLIME_<NAME>` variables; an unknown name is an error if close to a setting, else a warning.

    Returns:
        Settings of slime, and flags of other programs.
    """
    entries: dict[str, Entry] = {}
    given: list[tuple[str, Entry]] = []
    names = [*flag_specs(), *switched_off(), *respelled()]
    for variable in sorted(env):
        if not variable.startswith("SLIME_") or variable in _OTHER_ENV or variable.startswith(_OTHER_ENV_BEGINS):
            continue
        name, origin = variable.removeprefix("SLIME_").lower(), Origin("env", variable)
        name = respelled().get(name, name)
        if name in flag_specs():
            spec = flag_specs()[name]
            if not env[variable].strip() and (spec.kind == "bool" or spec.holds in ("path", "spec")):
                continue  # `SLIME_NO_PLUGINS= slime ...` is how a shell unsets one
            entries[name] = Entry(env[variable], origin)
        elif name in switched_off():
            try:
                entries[switched_off()[name]] = Entry(not truth(env[variable]), origin)
            except ValueError as error:
                raise ConfigError(f"{variable} {env[variable]!r}: {error}") from None
        elif find_foreign(foreign, name):
            given.append((name, Entry(env[variable], origin)))
        elif meant := did_you_mean(name, map(str.upper, names), cutoff=0.85, form="SLIME_{}"):
            raise ConfigError(f"unknown setting {variable} in the environment.{meant}")
        else:
            warnings.append(f"{variable} in the environment is no setting and has no effect.")
    return entries, given


def _read_text(name: str, entry: Entry) -> Entry:
    """Parse a list or mapping that its source gave as one string."""
    spec = flag_specs()[name]
    if not isinstance(entry.value, str) or not (spec.is_list or spec.kind == "mapping"):
        return entry
    if spec.is_list and entry.origin.kind == "file":
        return Entry([entry.value], entry.origin)
    try:
        return Entry(spec.read(entry.value), entry.origin)
    except ValueError as error:
        raise ConfigError(f"{spec.flag} {entry.value!r} ({entry.origin}): not valid JSON: {error}") from None


def _apply_set(layered: Layered, text: str) -> None:
    path, equals, raw = text.partition("=")
    keys = [k.strip() for k in path.split(".")]
    root = keys[0].replace("-", "_")
    specs = flag_specs()
    if not equals or not all(keys):
        raise ConfigError(f"--set {text!r} (flag): expected NAME.KEY=VALUE, e.g. plugins.math.tolerance=1e-6")
    if len(keys) == 1 and root in specs:
        raise ConfigError(f"--set {text!r} (flag): {root} is a setting of its own; use {specs[root].flag}.")
    if root == CUSTOM_KEY and len(keys) == 2:
        layered.custom[keys[1]] = Entry(_scalar(text, raw), FLAG)
        return
    if root not in specs or specs[root].kind != "mapping":
        mappings = ", ".join(n for n, s in specs.items() if s.kind == "mapping")
        raise ConfigError(
            f"--set {text!r} (flag): {keys[0]!r} is not a mapping; for an option of a plugin write"
            f" --set plugins.{path}=... (mappings: {mappings})"
        )
    value = _scalar(text, raw)
    entry = layered.values.get(root)
    tree = copy.deepcopy(entry.value) if entry and isinstance(entry.value, dict) else {}
    node = tree
    for key in keys[1:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {text!r} (flag): {key!r} is not a mapping.")
    node[keys[-1]] = value
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


def _words(layered: Layered, error: Any) -> str:
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


def _scalar(text: str, raw: str) -> Any:
    """Parse the value of `--set NAME.KEY=VALUE` as YAML."""
    try:
        return read_scalar(raw)
    except ValueError as error:
        raise ConfigError(f"--set {text!r} (flag): {error}") from None
