"""Which parameters `--only-train-params-name-list` and `--freeze-params-name-list` leave to training.

Called by `checks.py` before a process starts and by `roles.py` on every rank; both ask for the whole model, so the
ranks agree without a word between them. Imports no Megatron.
"""

from __future__ import annotations

from slime_embedded.models.lora import is_projection, module_of

from slime_core.errors import ConfigError
from slime_trainer_megatron.families.family import MegatronModel, places
from slime_trainer_megatron.settings import MegatronSettings


def trained_names(settings: MegatronSettings, family: MegatronModel) -> tuple[set[str], list[str]]:
    """HF names of what is trained, of the model or of adapters, and warnings; see `CommonSettings.trained`.

    Raises:
        ConfigError: As there; or a list divides what Megatron keeps in one parameter; or there are adapters of nothing.
    """
    parameters = _trainable(settings, family)
    trained, warnings = settings.trained([(name, own) for names, own in parameters for name in names])
    for names, _ in parameters:
        chosen = [name for name in names if name in trained]
        if len(chosen) not in (0, len(names)):
            raise ConfigError(
                f"{settings.list_flag}: Megatron keeps {', '.join(names)} in one parameter, and the list has"
                f" {', '.join(chosen)} trained without the others; choose all of them or none"
            )
    return trained, warnings


def _trainable(settings: MegatronSettings, family: MegatronModel) -> list[tuple[tuple[str, ...], str]]:
    """Every parameter that could be trained: HF's names, and Megatron's ("" of an adapter)."""
    if settings.lora is None:
        return [(place.hf, place.megatron) for place in places(family)]
    inside = [place.hf for place in places(family) if not place.row.vocabulary]
    # The rank is compared with the shapes when the adapters are made.
    square = (settings.lora.rank, settings.lora.rank)
    chosen = set(settings.lora.select({name: square for names in inside for name in names if is_projection(name)}))
    modules = [tuple(module_of(name) for name in names if name in chosen) for names in inside]
    words = ("lora_A", "lora_B")
    return [(tuple(f"{name}.{word}" for name in names), "") for names in modules if names for word in words]
