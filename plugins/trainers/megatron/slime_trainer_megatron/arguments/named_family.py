"""The model family that a launch script names without a checkpoint: by `--model`, `--spec`, or a preset's numbers.

`flags.check_flags` calls this, so that `slime check --flags-only` refuses a family that has no plugin. When the
checkpoint's `config.json` is there, `load_megatron_model` reads the family from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.protocols import Args

if TYPE_CHECKING:
    from slime_core.config.settings import Entry


def check_named_family(args: Args, given: Mapping[str, Entry]) -> None:
    """Raise PluginNotFoundError if the flags name a family without a plugin.

    Args:
        args: The run's settings; nothing is checked if the checkpoint's `config.json` is there.
        given: Megatron's flags, by attribute.
    """
    from slime_core.models.config import family_plugin
    from slime_core.plugins.manager import current_registry

    if args.custom_model_provider_path or (Path(str(args.hf_checkpoint)) / "config.json").is_file():
        return
    known = current_registry().names("megatron_models")
    for origin, families in _named_families(args, given):
        if not set(families) & set(known):
            family_plugin("megatron_models", families[0], origin)


def _named_families(args: Args, given: Mapping[str, Entry]) -> Iterator[tuple[str, list[str]]]:
    """Yield the statement of a model, as messages cite it, and the families that the statement fits."""
    from slime_core.distributions import entry_points
    from slime_trainer_megatron.arguments.flag_names import SPEC_FAMILIES, TAKEN_SPECS
    from slime_trainer_megatron.arguments.flags import flag_list, shown

    spec = given.get("spec")
    if spec is not None and isinstance(spec.value, Sequence) and str(spec.value[0]).startswith(TAKEN_SPECS):
        module = str(spec.value[0]).removeprefix(TAKEN_SPECS).split(".")[0]
        yield f"{shown('spec', spec.value)} ({spec.origin})", [SPEC_FAMILIES.get(module, module)]
    if not {"num_layers", "hidden_size"} <= given.keys():
        return
    flags = flag_list().by_name
    same = {}
    models = {
        name: model for _, entry, _ in entry_points("slime.named_models") for name, model in entry.load()().items()
    }
    for name, model in models.items():
        stated = {flags[flag.replace("-", "_")].dest: value for flag, value in model.flags().items()}
        numbers = {key: value for key, value in stated.items() if type(value) in (int, float)}
        if stated.keys() <= given.keys() and all(given[key].value == value for key, value in numbers.items()):
            same[name] = model.model_type
    if same:
        cited = (
            f"--model {args.model}" if args.model else f"the model's numbers, which are those of {' or '.join(same)}"
        )
        yield cited, list(same.values())
