"""`load_settings`: command line, environment and files -> checked `Settings`; every command starts here.

Order: layers are read and typed, unsupported settings are refused, then rules fill in what follows from the values
and check them against each other. Only configuration files are read, and nothing is started.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from slime_core.config.backends import choose_backends
from slime_core.config.flags import SettingsParser
from slime_core.config.foreign import ByOwner, ForeignFlags, Lists, by_owner, find_foreign, find_owners
from slime_core.config.layers import collect, lay_below, validate
from slime_core.config.origins import Entry, Origin
from slime_core.config.schema import RULES, Args, Defaults
from slime_core.config.sections.base import run_rules
from slime_core.config.settings import Settings
from slime_core.config.spec import as_flags, flag_specs
from slime_core.config.support import check_support
from slime_core.config.yaml_file import dump_value
from slime_core.distributions import AllowList, entry_points
from slime_core.errors import ConfigError
from slime_core.secrets import learn_environment, learn_flags, refuse_marks

logger = logging.getLogger(__name__)

Preset: TypeAlias = Callable[[Args, Mapping[str, Origin]], tuple[Mapping[str, Any], str]]
"""Function (the user's settings, their origins) -> (settings that a component brings, name of the component)."""


def load_settings(
    argv: Sequence[str],
    *,
    command: str = "train",
    env: Mapping[str, str] | None = None,
    foreign: Sequence[ForeignFlags] | None = None,
    preset: Preset | None = None,
    files: bool = True,
    fetch: bool = True,
    arguments: Mapping[str, Any] | None = None,
) -> Settings:
    """Read all layers, derive further settings from them, and check them against each other.

    Args:
        argv: Flags, without the command's name; a run file may stand first, as if after --config.
        command: "train", "sft", "eval", "rollout" or "serve" decide which settings are required; "show" requires none.
        env: Environment; the process's by default.
        foreign: Pass-through flags of other programs; by default Megatron's and those of installed distributions.
        preset: Called once for settings that a chosen component brings; their layer is between defaults and files.
        files: If False, skip a configuration file that is not on this machine, with a warning.
        fetch: If False, leave names of remote models and data sets as they are.
        arguments: Setting -> value, given in Python; overrides all other layers.

    Raises:
        ConfigError: A setting is unknown, malformed, unsupported or contradicts another.
        SystemExit: `--help`, or a help flag for another program's flags, was given; the help has been printed.
    """
    env = os.environ if env is None else env
    first = Path(argv[0] if argv and not argv[0].startswith("-") else "")
    if first.suffix in (".yaml", ".yml") or first.is_file():
        argv = ["--config", *argv]
    unusable: list[str] = []
    if foreign is None:
        foreign, unusable = find_owners(argv, env)
    parser = SettingsParser(foreign, prog=f"slime {command if command != 'show' else 'config show'}")
    learn_flags(argv)
    learn_environment(env)
    parsed = parser.read_own(argv)
    layered = collect(parsed, env, foreign, arguments, files=files)
    given = {name: entry.value for name, entry in layered.values.items()}
    if parsed.help_flag:
        from slime_core.config.help import flags_text

        print(flags_text([owner for owner in foreign if owner.help_flag == parsed.help_flag], given))
        raise SystemExit(0)
    layered.warnings += unusable
    lists = Lists(foreign, given)
    layered.given[:0] = _flags_of_named_model(layered.values.get("model"), argv, foreign)
    layered.foreign = {**lists.read(layered.given), **parser.read_all(argv, lists, parsed.rest).foreign}
    args, origins = validate(layered)
    brought, where = preset(args, origins) if preset is not None else ({}, "")
    if brought:
        lay_below(layered, brought, where)
        args, origins = validate(layered)
    for name, origin in origins.items():
        refuse_marks(name, getattr(args, name), origin)
    settings = Settings(
        args,
        origins,
        command,
        list(layered.warnings),
        (*argv, *as_flags(arguments or {})),
        foreign=tuple(layered.foreign),
        custom=tuple(layered.custom),
        files=files,
    )
    choose_backends(settings, layered.foreign, foreign)
    args.answer_for_absent(Defaults(tuple(o.default_of for o in foreign if o.default_of is not None)))
    settings.warnings += check_support(args, origins)
    theirs = by_owner(foreign, layered.foreign)
    _settle_foreign(settings, theirs)
    if fetch:
        _fetch(settings, checked=False)
    run_rules(settings, RULES)
    if fetch:
        _fetch(settings, checked=True)
    settings.warnings += [w for owner, own in theirs if owner.check is not None for w in owner.check(args, own)]
    if args.megatron_config_path and not settings.is_absent("megatron_config_path"):
        from slime_core.config.role_settings import check_role_settings

        settings.warnings += check_role_settings(args, foreign)
    for warning in settings.warnings:
        logger.warning("%s", warning)
    return settings


def _fetch(settings: Settings, *, checked: bool) -> None:
    """Let distributions replace names of remote models and data sets by local paths (entry points `slime.fetchers`).

    Before the settings are checked against each other, only what the rules read is needed.
    """
    for _, entry, _ in entry_points("slime.fetchers", AllowList.of(settings.argv)):
        entry.load()(settings, checked=checked)


def _settle_foreign(settings: Settings, given: ByOwner) -> None:
    """Derive settings from flags of the chosen backends, and warn of flags that the backends ignore.

    Raises:
        ConfigError: An ignored flag gives a number of processes to split over.
    """
    args, trains = settings.args, settings.command in ("train", "sft") and not settings.args.debug_rollout_only
    parts = {args.train_backend, args.rollout_engine}
    unused, refused = [], []
    for owner, own in given:
        if parts & {*owner.used_by}:
            for name, (value, why) in owner.derives(own).items() if owner.derives is not None else ():
                if not settings.is_given(name):
                    settings.derive(name, value, why)
            continue
        for name, entry in own.items():
            if entry.origin.kind == "preset" or entry.value is None:
                continue  # `--model` names the model for every trainer
            value = "" if entry.value is True else f" {dump_value(entry.value)}"
            shown = f"--{name.replace('_', '-')}{value} ({entry.origin})"
            unused.append(shown)
            if trains and name in owner.sizes and isinstance(entry.value, int) and entry.value > 1:
                other = f"{flag_specs()[owner.chooses].flag} {owner.used_by[0]}"
                refused.append(f"{shown}: {settings.cite(owner.chooses)} splits no model; remove it, or type {other}.")
    if refused:
        raise ConfigError("\n".join(refused))
    if unused:
        chosen = f"--train-backend {args.train_backend} and --rollout-engine {args.rollout_engine}"
        settings.warnings.append(f"without effect with {chosen}: {', '.join(unused)}")


def _flags_of_named_model(
    named: Entry | None, argv: Sequence[str], foreign: Sequence[ForeignFlags]
) -> list[tuple[str, Entry]]:
    """Return the architecture numbers of the model that `--model` names, as flags read from a file.

    A file, an environment variable or a flag overrides a number; the trainer later checks that the number agrees with
    the checkpoint.

    Args:
        named: The value of `--model`.
        argv: The command line.
        foreign: Owners of pass-through flags; a flag that no owner knows is skipped.

    Raises:
        ConfigError: There is no such model.
    """
    if named is None or named.value is None:
        return []
    from slime_core.config.named_models import named_model

    model = named_model(str(named.value), str(named.origin), argv)
    origin = Origin("preset", f"--model {model.name}")
    given = [(flag.replace("-", "_"), Entry(value, origin)) for flag, value in model.flags().items()]
    return [(name, entry) for name, entry in given if find_foreign(foreign, name)]
