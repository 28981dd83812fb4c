"""`load_settings`: command line, environment and files -> checked `Settings`; every command starts here.

Order: layers are read and typed, "auto" becomes the name of a backend, unsupported settings are refused, then rules
fill in what follows from the values and check them against each other. Only configuration files are read, and nothing
is started. Owners of flags declare which backend their flags choose (`ForeignFlags.chooses`, `chosen_by`). The choice
does not depend on the machine: the same command selects the same backend everywhere, and `launch.checks` reports one
that is not installed. The numbers of `--model NAME` come from a plugin, as flags of other programs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from slime_core.config import eval_config
from slime_core.config.flags import SettingsParser
from slime_core.config.foreign import ByOwner, ForeignFlags, Lists, by_owner, find_foreign, find_owners
from slime_core.config.layers import collect, lay_below, validate
from slime_core.config.schema import Args, Defaults
from slime_core.config.sections import algorithm, cluster, data, progress, reward, rollout, run, train
from slime_core.config.sections import logging as logging_section
from slime_core.config.sections.base import Rule, run_rules
from slime_core.config.settings import Entry, Origin, Settings
from slime_core.config.spec import flag_specs
from slime_core.config.support import check_support
from slime_core.config.yaml_file import dump_value
from slime_core.distributions import BUNDLE, AllowList, entry_points, offered, provided
from slime_core.errors import ConfigError
from slime_core.secrets import learn_environment, learn_flags, refuse_marks

logger = logging.getLogger(__name__)

Preset: TypeAlias = Callable[[Args, Mapping[str, Origin]], tuple[Mapping[str, object], str]]
"""Function (the user's settings, their origins) -> (settings that a component brings, name of the component)."""

AUTO = "auto"
WITHOUT_FLAGS = "embedded"
"""Backend that "auto" selects by default; it needs no package besides slime itself."""
BACKENDS = ("train_backend", "rollout_engine")

RULES: tuple[Rule, ...] = (
    rollout.model_is_named,
    *run.RULES,
    *logging_section.RULES,
    *data.RULES,
    *progress.RULES,
    *rollout.RULES,
    *train.RULES,
    *eval_config.RULES,
    rollout.response_is_bounded,
    *reward.RULES,
    *algorithm.RULES,
    *cluster.RULES,
    progress.asynchrony,
)
"""Rules in the order in which they run; each is defined below the settings that it reads. An earlier rule derives
values that a later rule reads: data comes before the settings that divide it, and the lengths of a rollout come before
the lengths of evaluation, whose defaults they are."""


def load_settings(
    argv: Sequence[str],
    *,
    command: str = "train",
    env: Mapping[str, str] | None = None,
    foreign: Sequence[ForeignFlags] | None = None,
    preset: Preset | None = None,
    files: bool = True,
    fetch: bool = True,
    arguments: Mapping[str, object] | None = None,
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
    arguments = arguments or {}
    layered = collect(parsed, env, foreign, arguments, files=files)
    given = {name: entry.value for name, entry in layered.values.items()}
    if parsed.help_flag:
        for owner in foreign:
            if owner.help_flag == parsed.help_flag:
                print(owner.help(given))
        raise SystemExit(0)
    layered.warnings += unusable
    lists = Lists(foreign, given)
    if (model := layered.values.get("model")) and model.value is not None:
        flags_of = offered("slime.api", "flags_of_named_model")
        if flags_of is None:
            cited = f"--model {model.value!r} ({model.origin})"
            raise ConfigError(f"{cited}: no plugin that knows published models is installed; pip install {BUNDLE}")
        layered.given[:0] = flags_of(model, argv, foreign)
    layered.foreign = {**lists.read(layered.given), **parser.read_foreign(argv, lists, parsed.rest)}
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
        layered.warnings,
        (*argv, *parser.words_of(arguments, lists)),
        foreign=tuple(layered.foreign),
        custom=tuple(layered.custom),
        files=files,
    )
    _settle(settings, layered.foreign, foreign, fetch)
    return settings


def _settle(settings: Settings, given: Mapping[str, Entry], foreign: Sequence[ForeignFlags], fetch: bool) -> None:
    """Choose backends, derive settings by rules and check them against each other; log the warnings.

    Args:
        settings: Typed settings.
        given: Other programs' flags, by attribute.
        foreign: The possible owners of those flags.
        fetch: If False, leave names of remote models and data sets as they are.

    Raises:
        ConfigError: A setting is unsupported or contradicts another.
    """
    args = settings.args
    _choose_backends(settings, given, foreign)
    args.answer_for_absent(Defaults(tuple(o.default_of for o in foreign if o.default_of is not None)))
    settings.warnings += check_support(args, settings.origins)
    theirs = by_owner(foreign, given)
    _settle_foreign(settings, theirs)
    if fetch:
        _fetch(settings, checked=False)
    run_rules(settings, RULES)
    if fetch:
        _fetch(settings, checked=True)
    settings.warnings += [w for owner, own in theirs if owner.check is not None for w in owner.check(args, own)]
    if args.megatron_config_path and not settings.is_absent("megatron_config_path"):
        settings.warnings += provided("slime.api", "settle_role_settings")(args, foreign)
    for warning in settings.warnings:
        logger.warning("%s", warning)


def _choose_backends(settings: Settings, given: Mapping[str, Entry], owners: Sequence[ForeignFlags]) -> None:
    """Replace "auto" in both settings; the origin of each records the reason.

    Args:
        settings: Typed settings, before any rule is applied.
        given: Other programs' flags, by attribute.
        owners: The possible owners of those flags.

    Raises:
        ConfigError: Flags of several backends were given.
    """
    for name in BACKENDS:
        if getattr(settings.args, name) != AUTO:
            continue
        chosen = dict(_by_flags(name, given, owners)) or dict(_by_settings(name, settings, owners))
        if len(chosen) > 1:
            told = " and ".join(f"{value} (because of {why})" for value, why in chosen.items())
            flag = flag_specs()[name].flag
            raise ConfigError(f"{flag} auto: {told} are both asked for; type {flag} NAME, or remove the other's flags.")
        value, why = next(iter(chosen.items()), (WITHOUT_FLAGS, ""))
        setattr(settings.args, name, value)
        if why or settings.is_given(name):
            settings.origins[name] = Origin("auto", f"because of {why}" if why else "")


def _by_flags(name: str, given: Mapping[str, Entry], owners: Sequence[ForeignFlags]) -> Iterator[tuple[str, str]]:
    """Yield (backend, flag) for foreign flags, in reverse order given."""
    for attribute, entry in reversed([*given.items()]):
        owner = find_foreign(owners, attribute)
        # `--model` names the model for every trainer.
        if owner is None or entry.origin.kind == "preset" or entry.value is None:
            continue
        if owner.chooses == name and owner.used_by:
            yield owner.used_by[0], entry.named or "--" + attribute.replace("_", "-")


def _by_settings(name: str, settings: Settings, owners: Sequence[ForeignFlags]) -> Iterator[tuple[str, str]]:
    """Yield (backend, flags) for slime's own settings that only one backend supports."""
    for owner in owners:
        if owner.chooses != name or not owner.used_by:
            continue
        for together in owner.chosen_by:
            if all(_is_asked(settings, n) for n in together):
                yield owner.used_by[0], " and ".join(_named(settings, n) for n in together)
                break


def _is_asked(settings: Settings, name: str) -> bool:
    """Return True if the user enabled the setting; 0 GPUs for inference count, since they mean routers alone."""
    value = getattr(settings.args, name)
    return settings.is_given(name) and value is not None and value is not False


def _named(settings: Settings, name: str) -> str:
    origin = settings.origins[name]
    return flag_specs()[name].flag + ("" if origin.kind == "flag" else f" ({origin})")


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
