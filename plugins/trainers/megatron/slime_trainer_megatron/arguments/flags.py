"""Define Megatron's own flags, for the entry point `slime.foreign_flags: megatron`.

Every command imports this module, so expensive work is delayed until a flag is given. A field of megatron-core's
configurations is a flag under its own name and under Megatron's name; its attribute on `args` has the field's name. A
boolean has three spellings: `--x`, `--no-x`, `--disable-x`. Names of slime's own settings (`--lr`,
`--recompute-granularity`) are excluded; `config.py` passes their values to Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from slime_core.config import ForeignFlags
from slime_core.protocols import Args

if TYPE_CHECKING:
    from slime_core.config import FlagParser
    from slime_core.config.settings import Entry
    from slime_trainer_megatron.arguments.fields import ConfigField, FieldList
    from slime_trainer_megatron.arguments.flag_names import Named

USED_BY = ("megatron",)
CHOSEN_BY = (
    "actor_num_gpus_per_node",
    "actor_num_nodes",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
    "custom_megatron_init_path",
    "custom_model_provider_path",
)
"""Settings that choose this trainer: GPUs for training, and settings that only this trainer uses."""
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def megatron_flags() -> ForeignFlags:
    """Return the owner of Megatron's flags."""
    return ForeignFlags(
        "Megatron",
        lambda _: flag_list(),
        used_by=USED_BY,
        chooses="train_backend",
        chosen_by=tuple((name,) for name in CHOSEN_BY),
        sizes=SIZES,
        default_of=default_of,
        help_flag="help-megatron",
        examples=("tensor-model-parallel-size", "pipeline-model-parallel-size", "sequence-parallel"),
        check=check_flags,
    )


def default_of(args: Args, name: str) -> Any:
    """Return Megatron's value of an attribute that was not given. Raises LookupError if it has none."""
    from slime_trainer_megatron.arguments import defaults

    return defaults.default_of(args, name)


@cache
def flag_list() -> FlagParser:
    """Return every flag of megatron-core."""
    from slime_trainer_megatron.arguments.fields import known_fields

    return flags_of(known_fields())


def shown(name: str, value: Any) -> str:
    """Return the flag and value that set an attribute, for messages."""
    from slime_core.config.flag_parser import off_names, words

    flag = flag_list().by_name[name]
    return flag.option_strings[0] if value is False and not off_names(flag) else " ".join(words(flag, value))


def flags_of(fields: FieldList) -> FlagParser:
    """Return the fields and the names of `flag_names` as flags, without slime's own settings."""
    from slime_core.config import FlagParser
    from slime_core.config.spec import flag_specs
    from slime_trainer_megatron.arguments.flag_names import without_field

    parser = FlagParser(fields.version)
    for name, field in fields.fields.items():
        if name not in flag_specs():
            _add_field(parser, field)
    for name, named in without_field().items():
        if name.replace("-", "_") not in flag_specs():
            _add_named(parser, name, named)
    return parser


def _add_field(parser: FlagParser, field: ConfigField) -> None:
    from slime_core.config.flag_parser import OneOrMore, Switch
    from slime_trainer_megatron.arguments.flag_names import ALIASES
    from slime_trainer_megatron.arguments.values import layers_of

    own, others = field.name.replace("_", "-"), [name for name, target in ALIASES.items() if target == field.name]
    is_off = field.kind == "bool" and field.default is True
    names = [*(() if is_off else field.names), own, *others]
    shape: dict[str, Any] = {"choices": field.choices or None, "type": {"int": int, "float": float}.get(field.kind)}
    if field.shape == "list":
        shape["nargs"] = "+"
    elif field.shape == "either":
        shape |= {"nargs": "+", "action": OneOrMore, "metavar": "VALUE", "type": layers_of(shape["type"])}
    if field.kind == "bool":
        off = [*(field.names if is_off else ()), *(f"{word}-{name}" for name in names for word in ("no", "disable"))]
        shape = {"action": Switch, "off": [f"--{name}" for name in off]}
    text = _field_help(field).replace("%", "%%")
    parser.add_argument(*(f"--{name}" for name in names), dest=field.name, default=field.default, help=text, **shape)


def _field_help(field: ConfigField) -> str:
    """Return Megatron's help text, with a note by slime if the field has no effect."""
    from slime_trainer_megatron.arguments.owned import NO_EFFECT, OWNED

    if field.name in OWNED:
        return f"Slime's to set: {OWNED[field.name][1]}."
    note = f" (Without effect: {NO_EFFECT[field.name]}.)" if field.name in NO_EFFECT else ""
    return field.help + note


def _add_named(parser: FlagParser, name: str, named: Named) -> None:
    from slime_core.config.flag_parser import Switch
    from slime_trainer_megatron.arguments.flag_names import GRANTED, REFUSED, STATED

    text = named.text
    if name in STATED:
        text += " Compared with config.json."
    elif name in GRANTED:
        text = f"Without effect: {text}."
    elif name in REFUSED:
        text = f"Refused: {text}."
    shape: dict[str, Any] = {"choices": named.choices or None, "type": {"int": int, "float": float}.get(named.kind)}
    shape["nargs"] = "+" if named.is_list else None
    if named.kind in ("switch", "toggle"):
        shape = {"action": Switch, "off": [f"--no-{name}"] if named.kind == "toggle" else []}
    parser.add_argument(f"--{name}", default=named.default, help=text, **shape)


def check_flags(args: Args, given: Mapping[str, Entry]) -> Sequence[str]:
    """Check the given flags, without reading the model.

    Args:
        args: The run's settings.
        given: Megatron's flags, by attribute.

    Returns:
        A warning about flags without effect. If another trainer is chosen, which uses none of the flags, a warning
        about flags that describe another model than the checkpoint.

    Raises:
        ConfigError: Flags that slime sets itself or refuses; one message lists all of them.
        PluginNotFoundError: The flags name a model family without a plugin.
    """
    from slime_core.errors import ConfigError
    from slime_trainer_megatron.arguments.named_family import check_named_family

    if args.train_backend not in USED_BY:
        return _of_another_model(args, given)
    check_named_family(args, given)
    refused: list[str] = []
    idle: list[str] = []
    for name, entry in given.items():
        cited = f"{shown(name, entry.value)} ({entry.origin})"
        for is_refused, reason in _reasons(name, entry.value):
            (refused if is_refused else idle).append(f"{cited}: {reason}")
    if refused:
        raise ConfigError("\n".join(refused))
    return [f"without effect: {'; '.join(idle)}"] if idle else []


def _of_another_model(args: Args, given: Mapping[str, Entry]) -> Sequence[str]:
    """Return a warning if the trained checkpoint is not the model that the launch script describes."""
    from pathlib import Path

    from slime_core.errors import ConfigError, PluginError
    from slime_core.models.config import read_hf_config
    from slime_trainer_megatron.arguments.architecture import COMPARED, mismatches
    from slime_trainer_megatron.families.family import load_megatron_model

    typed = {name for name, entry in given.items() if entry.origin.kind != "preset" and entry.value is not None}
    directory = Path(args.hf_checkpoint or "")
    if not typed & COMPARED.keys() or not (directory / "config.json").is_file():
        return []
    try:
        architecture = load_megatron_model(directory).architecture
    except (ConfigError, PluginError):
        return []  # without a plugin for the family there is no comparison; the trainer reads config.json itself
    found = mismatches(args, read_hf_config(directory), architecture)
    told = f"--hf-checkpoint {args.hf_checkpoint} is trained, which is another model than the flags describe: "
    return [told + "; ".join(found)] if found else []


def _reasons(name: str, value: Any) -> Iterator[tuple[bool, str]]:
    """Yield (True for an error, reason) for a flag that is refused or without effect."""
    from slime_trainer_megatron.arguments.flag_names import GRANTED, REFUSED, TAKEN_SPECS
    from slime_trainer_megatron.arguments.owned import NO_EFFECT, OWNED

    dashed = name.replace("_", "-")
    if value is None or (value is False and (dashed in GRANTED or dashed in REFUSED)):
        return
    if name in OWNED:
        always, reason = OWNED[name]
        yield value != always, f"slime sets it: {reason}" if value != always else "slime sets the same by itself"
    elif name in NO_EFFECT:
        yield False, NO_EFFECT[name]
    elif dashed in GRANTED:
        yield False, GRANTED[dashed].text
    elif name == "spec" and value and str(value[0]).startswith(TAKEN_SPECS):
        yield False, REFUSED[dashed].text
    elif dashed in REFUSED:
        yield value not in REFUSED[dashed].same, REFUSED[dashed].text
