"""`slime.rollout.on_policy_distillation`: a teacher behind SGLang's `/generate` scores the student's tokens.

Two halves, as in THUDM/slime: `--custom-rm-path` with `reward_func`, `--custom-reward-post-process-path` with
`post_process_rewards`. The reward `on_policy_distillation` does both in its reward alone.
"""

from __future__ import annotations

from typing import Any

from slime import _missing
from slime.utils.http_utils import post
from slime_core.errors import ConfigError
from slime_core.sample import Sample


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """The teacher's answer to the sample's tokens, from `args.rm_url`.

    Raises:
        ConfigError: `--rm-url` is not set.
        aiohttp.ClientError, TimeoutError: See `slime.utils.http_utils.post`.
    """
    if not getattr(args, "rm_url", None):
        raise ConfigError("slime.rollout.on_policy_distillation.reward_func needs --rm-url http://HOST:PORT/generate")
    body = {
        "input_ids": sample.tokens,
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return await post(args.rm_url, body, timeout=getattr(args, "rm_timeout", None))


def post_process_rewards(args: Any, samples: list[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """Set `teacher_log_probs` from the answers in `sample.reward`; raw and shaped rewards are 0.

    Raises:
        slime_core.errors.PluginError: An answer does not score the response's tokens.
    """
    module = _missing.plugin(
        "slime_rewards.on_policy_distillation",
        "slime.rollout.on_policy_distillation.post_process_rewards",
    )
    rewards: tuple[list[float], list[float]] = module.post_process_rewards(args, samples)
    return rewards


__all__ = ["post_process_rewards", "reward_func"]
__getattr__ = _missing.names(__name__)
