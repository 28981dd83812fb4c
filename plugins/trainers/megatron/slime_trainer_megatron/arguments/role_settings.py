"""`--megatron-config-path`: settings of the actor's trainer and of the critic's, where they differ.

    megatron:
      - name: value model        # for people
        role: critic             # actor or critic, at most one entry of each
        overrides:               # or "args", THUDM/slime's other name for it
          lr: 1e-5
          recompute_granularity: full

`load_settings` reads the file into `args.role_settings`; `launch.roles.role_args` lays a role's part over the run's
settings. An entry may hold what a trainer alone reads: the settings in `PER_ROLE`, flags of another program that the
chosen trainer takes, and keys of the user's own. The loop and the loss read the run's `args`, never these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from slime_core.config.foreign import ForeignFlags, Lists, by_owner, find_foreign
from slime_core.config.layers import Layered, validate
from slime_core.config.schema import Args
from slime_core.config.sections.train import OptimizerArgs
from slime_core.config.settings import Entry, Origin
from slime_core.config.spec import flag_specs
from slime_core.config.yaml_file import read_yaml
from slime_core.errors import ConfigError, did_you_mean

Role = Literal["actor", "critic"]
ROLES: tuple[Role, ...] = ("actor", "critic")
ENTRIES = "megatron"
"""The file's one key, whichever trainer runs."""

PER_ROLE = (
    *(name for name in OptimizerArgs.__annotations__),
    "recompute_granularity",
    "recompute_loss_function",
    "log_probs_chunk_size",
    "padded_vocab_size",
    "dtype",
    "bf16",
    "save_dtype",
    "no_save_optim",
    "no_save_rng",
    "no_load_optim",
    "no_load_rng",
)
"""slime's own settings that may differ between roles: those of the optimizer, of memory, precision and checkpoints."""

_IGNORED = ("num_nodes", "num_gpus_per_node")
"""Keys of THUDM/slime's files; the critic has the actor's processes."""


def settle_role_settings(args: Args, foreign: Sequence[ForeignFlags]) -> list[str]:
    """Read the file into `args.role_settings`; return the warnings of the flags' owners.

    Raises:
        ConfigError: The file cannot be read, or an entry is malformed or unknown; all with file and line.
    """
    path = args.megatron_config_path
    items = read_yaml(str(path), f"--megatron-config-path {path!r}")
    for key in items:
        if key != ENTRIES:
            raise ConfigError(f"{items[key].where}: unknown key {key!r}; the file has one, {ENTRIES!r}")
    if ENTRIES not in items:
        raise ConfigError(f"--megatron-config-path {path!r}: no key {ENTRIES!r}, a list of entries with 'role'")
    where, entries = items[ENTRIES].where, items[ENTRIES].value
    if not isinstance(entries, list):
        raise ConfigError(f"{where}: {ENTRIES!r} is a list of entries with 'role' and 'overrides'")
    warnings: list[str] = []
    for number, entry in enumerate(entries):
        role, own = _entry(f"{where}: megatron[{number}]", entry)
        if role in args.role_settings:
            raise ConfigError(f"{where}: megatron[{number}]: there is an entry for {role!r} already; merge them")
        typed = _typed(args, own, f"{where}: {role}", foreign)
        args.role_settings[role] = {name: value.value for name, value in typed.items()}
        for owner, theirs in by_owner(foreign, typed):
            if owner.check is not None:
                warnings += [f"{role}: {warning}" for warning in owner.check(args, theirs)]
    return warnings


def _entry(where: str, entry: object) -> tuple[Role, dict[str, object]]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected a mapping with 'role' and 'overrides'")
    known = ("name", "role", "overrides", "args", *_IGNORED)
    for key in entry:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}.{did_you_mean(str(key), known)}")
    role = entry.get("role")
    if role not in ROLES:
        raise ConfigError(f"{where}: role {role!r}: must be one of {', '.join(ROLES)}")
    given = [key for key in ("overrides", "args") if entry.get(key) is not None]
    if len(given) == 2:
        raise ConfigError(f"{where}: 'overrides' and 'args' are the same; keep one")
    own = entry[given[0]] if given else {}
    if not isinstance(own, dict):
        raise ConfigError(f"{where}: {given[0]!r} is a mapping of settings to values")
    return role, {str(key).replace("-", "_"): value for key, value in own.items()}


def _typed(args: Args, own: Mapping[str, object], where: str, foreign: Sequence[ForeignFlags]) -> dict[str, Entry]:
    layered, origin = Layered(owners=foreign), Origin("file", where)
    for name, value in own.items():
        if name in flag_specs() and name not in PER_ROLE:
            raise ConfigError(
                f"{where}: {name!r} is a setting of the whole run; a role may have {', '.join(PER_ROLE)}, and flags"
                f" of --train-backend {args.train_backend}"
            )
        owner = None if name in flag_specs() else find_foreign(foreign, name)
        if owner is not None and args.train_backend not in owner.used_by:
            chosen = f"--train-backend {args.train_backend}"
            raise ConfigError(f"{where}: {name!r} is {owner.owner}'s, and {chosen} does not take it; remove it")
        if layered.put(name, value, origin):
            continue
        if not hasattr(args, name):
            known = [*PER_ROLE, *(a for o in foreign if not o.prefixes for a in o.listed.by_name)]
            raise ConfigError(f"{where}: unknown setting {name!r}.{did_you_mean(name, known)}")
        layered.custom[name] = Entry(_like(getattr(args, name), value, f"{where}: {name}"), origin)
    typed, _ = validate(layered)
    settings = {name: Entry(getattr(typed, name), origin) for name in layered.values}
    return {**settings, **layered.custom, **Lists(foreign, {}).read(layered.given)}


def _like(existing: object, value: object, cited: str) -> object:
    """Return the value for a key of the user's own; text gets the type of the run's value."""
    if not isinstance(value, str) or not isinstance(existing, bool | int | float):
        return value
    try:
        return TypeAdapter[object](type(existing)).validate_python(value)
    except ValidationError:
        raise ConfigError(f"{cited} {value!r}: expected {type(existing).__name__}, as elsewhere in the run") from None
