"""`--model` against the `config.json` of `--hf-checkpoint`, before anything is loaded and whatever the trainer.

A number that the user gave as a Megatron flag is that flag's: the trainer compares it.
"""

from __future__ import annotations

from pathlib import Path

from slime_core.config import Settings
from slime_core.config.foreign import find_foreign, find_owners
from slime_core.config.named_models import named_model
from slime_core.errors import ConfigError
from slime_core.models.config import read_hf_config


def check_named_model(settings: Settings) -> None:
    """Compare the checkpoint, where its `config.json` is there, with the model that was named.

    Raises:
        ConfigError: The checkpoint is another model; every number that differs is listed.
    """
    args = settings.args
    if not (Path(str(args.hf_checkpoint)) / "config.json").is_file():
        return
    model = named_model(str(args.model), str(settings.origins.get("model", "")), settings.argv)
    hf = read_hf_config(str(args.hf_checkpoint))
    both = f"{settings.cite('model')} is not the model of {settings.cite('hf_checkpoint')}"
    if hf["model_type"] != model.model_type:
        raise ConfigError(f"{both}: {model.name} is of family {model.model_type}, config.json says {hf['model_type']}")
    different = [text for flag, text in model.contradictions(hf) if not _given(settings, flag)]
    if different:
        lines = "\n".join(different)
        raise ConfigError(f"{both}:\n{lines}\nRemove --model, or name the checkpoint's own; `slime models list`.")


def _given(settings: Settings, flag: str) -> bool:
    """Whether the user gave the flag, under whatever name its value is kept."""
    name = flag.replace("-", "_")
    owner = find_foreign(find_owners([], {})[0], name)
    origin = settings.origins.get(owner.parser({}).by_name[name].dest) if owner is not None else None
    return origin is not None and origin.kind in ("file", "env", "flag")
