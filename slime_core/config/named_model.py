"""`--model NAME` -> the lowest layer of Megatron's flags: the model's architecture numbers.

Called by `load_settings`. Whoever gives one of these flags in a file, the environment or as a flag replaces that
number; the trainer then finds out whether the checkpoint agrees.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.config.foreign import Given
from slime_core.config.origins import Entry, Origin
from slime_core.config.passthrough import ForeignFlags, find_foreign


def flags_of_named_model(named: Entry | None, foreign: Sequence[ForeignFlags]) -> list[Given]:
    """The flags of the model that `--model` names, as if a file had them.

    Args:
        named: What was given as `--model`.
        foreign: Owners of pass-through flags; a flag that none of them knows is left out, as nobody can take it.

    Raises:
        ConfigError: There is no such model.
    """
    if named is None or named.value is None:
        return []
    from slime_core.model_presets.megatron_flags import megatron_flags
    from slime_core.model_presets.presets import find_preset

    preset = find_preset(str(named.value), str(named.origin))
    origin = Origin("preset", f"--model {preset.name}")
    given = [Given(flag.replace("-", "_"), value, origin) for flag, value in megatron_flags(preset).items()]
    return [item for item in given if find_foreign(foreign, item.attribute)]
