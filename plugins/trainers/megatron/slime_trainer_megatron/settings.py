"""`args` -> the Megatron trainer's own settings, checked.

Called by `trainer.py` and `config.py`. `shared_settings` has the settings common to all trainers; `config.py` fills
the fields of Megatron's configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_embedded.trainer.shared_settings import CommonSettings, Role, common_values

from slime_core.models.config import read_hf_config
from slime_core.protocols import Args
from slime_trainer_megatron.layout import Layout


@dataclass(frozen=True)
class MegatronSettings(CommonSettings):
    """Settings of the trainer besides model, optimizer and schedule.

    `compute_dtype` of the base class is the dtype of the parameters; the optimizer's copies are float32.
    """

    layout: Layout

    @classmethod
    def from_args(cls, args: Args, role: Role = "actor") -> MegatronSettings:
        """Read the settings of the actor's or the critic's trainer.

        Raises:
            ConfigError: This trainer does not support a value.
        """
        values = common_values(args, role)
        return cls(**values, layout=Layout.from_args(args, _layers_of(str(values["hf_checkpoint"]))))


def _layers_of(directory: str) -> int | None:
    """Return the number of layers in config.json; None without the file, which another check reports."""
    if not (Path(directory) / "config.json").is_file():
        return None
    layers = read_hf_config(directory).get("num_hidden_layers")
    return None if layers is None else int(layers)
