"""Components -> a `RolloutStage`, in whichever process is to hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core.data.tokenizer import load_tokenizer
from slime_core.errors import ConfigError, DataError
from slime_core.launch.components import Components
from slime_core.launch.resolver import Resolver
from slime_core.observability.timeline import open_timeline
from slime_core.protocols import Args
from slime_core.rollout.filters import FilterStage
from slime_core.rollout.reward import RewardStage
from slime_core.rollout.reward_specs import check_named_rewards
from slime_core.rollout.stage import RolloutParts, RolloutStage
from slime_core.workers.call import user_code

if TYPE_CHECKING:
    from slime_core.rollout.eval_record import EvalRecord
    from slime_core.rollout.loop_thread import LoopThread


def build_rollout(
    args: Args,
    parts: Components,
    resolver: Resolver,
    hooks: Any,
    *,
    draws: bool = True,
    runner: LoopThread | None = None,
    eval_record: EvalRecord | None = None,
) -> RolloutStage:
    """Construct data source, tokenizer and (not yet started) engine; without `draws` there is no data source.

    Raises:
        ConfigError: The data cannot be used, or a row names a reward there is not.
    """
    with_engine = parts.engine is not None
    rewards = RewardStage(args, parts.reward, resolver.reward, workers=resolver)
    try:
        source = build_data_source(args, parts) if draws else None
        if with_engine:
            check_named_rewards(rewards, args, source)
    except DataError as error:  # nothing has begun: an error of the settings, as of a model
        raise ConfigError(str(error)) from error
    return RolloutStage(
        args,
        RolloutParts(
            data_source=source,
            rollout_function=parts.rollout_function,
            eval_function=parts.eval_function,
            tokenizer=load_tokenizer(args.hf_checkpoint) if with_engine else None,
            engine=parts.engine(args) if with_engine else None,
            generator=parts.generator,
            rewards=rewards,
            filters=FilterStage(args, parts.dynamic_filter, parts.dynamic_filter_name),
            resolve_generator=resolver.generator,
            estimator=parts.build_estimator(args),
            post_process_rewards=parts.post_process_rewards,
            convert_samples=parts.convert_samples,
            needs_address=parts.needs_address and not args.sglang_router_port,
            hooks=hooks,
            timeline=open_timeline(args) if draws else None,
            eval_record=eval_record,
            user=parts.user,
        ),
        _loop_thread() if args.async_training else None,
    )


def build_data_source(args: Args, parts: Components) -> Any:
    """The run's data source. Raises DataError, and PluginError for what a user's own raises."""
    with user_code("--data-source-path"):
        return parts.data_source(args)


def _loop_thread() -> LoopThread:
    from slime_core.rollout.loop_thread import LoopThread

    return LoopThread()
