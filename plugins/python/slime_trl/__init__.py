"""TRL's `GRPOConfig` and `GRPOTrainer` over `slime_core.Trainer`: change the import, keep the script.

    from slime_trl import GRPOConfig, GRPOTrainer
    from slime_trl.rewards import accuracy_reward

`fields.py` says what becomes of each field; a field without counterpart is refused by name.
"""

from slime_trl.config import GRPOConfig
from slime_trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
