"""`slime.rollout.sft_rollout.generate_rollout`: supervised samples; slime_core's rollout function `sft`."""

from __future__ import annotations

from typing import Any

from slime import _missing
from slime_core.protocols import RolloutTraits, declares
from slime_core.sample import RolloutFnTrainOutput


@declares(RolloutTraits(needs_engine=False))
def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """`rollout_batch_size` rows with loss masks over what the assistant wrote. Needs `--n-samples-per-prompt 1`.

    Raises:
        slime_core.errors.DataError: A row has no answer, or its template rewrites one.
        slime_core.errors.ConfigError: See `slime_commands.sft.rollout.generate_rollout`.
    """
    from slime_commands.sft.rollout import generate_rollout as supervised

    return supervised(args, rollout_id, data_buffer, evaluation)


__all__ = ["generate_rollout"]
__getattr__ = _missing.names(__name__)
