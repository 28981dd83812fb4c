"""`args` -> the Megatron trainer's own settings, checked.

Called by `trainer.py` and `config.py`. What every trainer has is in `trainers.settings`; what becomes a field of
Megatron's configurations is `config.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_core.models.config import read_hf_config
from slime_core.protocols import Args
from slime_core.trainers.settings import CommonSettings, Role, common_values
from slime_trainer_megatron.layout import Layout


@dataclass(frozen=True)
class MegatronSettings(CommonSettings):
    """What the trainer needs to know besides model, optimizer and schedule.

    `compute_dtype` of the base is the dtype of the parameters; those of the optimizer are float32.
    """

    layout: Layout

    @classmethod
    def from_args(cls, args: Args, role: Role = "actor") -> MegatronSettings:
        """The settings of the actor's trainer or the critic's.

        Raises:
            ConfigError: A value that this trainer cannot honour.
        """
        values = common_values(args, role)
        return cls(**values, layout=Layout.from_args(args, _layers_of(str(values["hf_checkpoint"]))))


def _layers_of(directory: str) -> int | None:
    """Of the model in config.json; None without one, which is somebody else's complaint."""
    if not (Path(directory) / "config.json").is_file():
        return None
    layers = read_hf_config(directory).get("num_hidden_layers")
    return None if layers is None else int(layers)
