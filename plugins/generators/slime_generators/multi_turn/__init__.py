"""Play turns of model and environment: the policy acts and the environment answers until the episode is done.

::

    prompt + first observation | turn <|end|> | observation <|assistant|> | turn <|end|>
    mask                         1 ...      1   0 ...                   0   1 ...      1

The environment is that of `--environment-path`, or of the row (`metadata["environment_path"]`). An interrupted sample
continues only if `restore` returns the environment to its last state. Otherwise it starts from the beginning, and
`metadata["environment"]["restarts"]` has the reason.

Options (`plugins: {multi_turn: ...}`), each of which a row's metadata may override, are in `Options`.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

from pydantic import Field
from slime_environments.session import Dialogue, EnvironmentSession

from slime_core import (
    Args,
    GenerateContext,
    GenerateTraits,
    PluginOptions,
    Sample,
    SampleStatus,
    declares,
    options,
)
from slime_core.errors import EnvironmentTimeoutError
from slime_generators.multi_turn.episode import Episode
from slime_generators.multi_turn.observations import (
    UNTEMPLATED,
    Observations,
    begin_answer,
    cut,
    encodable,
    finished_turns,
    keep_messages,
    next_turn,
    turn_tokens,
)

__all__ = [
    "UNTEMPLATED",
    "Observations",
    "Options",
    "begin_answer",
    "cut",
    "encodable",
    "finished_turns",
    "generate",
    "keep_messages",
    "next_turn",
    "turn_tokens",
]


class Options(PluginOptions):
    """The user's settings, such as `--set plugins.multi_turn.max_turns=10`."""

    max_turns: int = Field(8, gt=0)
    """Maximum number of turns of the policy; an episode that is not done by then is TRUNCATED."""
    max_turn_tokens: int | None = Field(None, gt=0)
    """Maximum number of tokens of a turn; a longer turn is cut and used as it is. Default: all tokens that are left."""
    reward: Literal["sum", "last", "environment", "none"] | None = None
    """Reward of the trajectory: the sum of the steps' rewards, the last step's reward, the environment's own (`score`),
    or none, so that --rm-type scores. Default: none if the run or the row names a reward, else sum."""
    timeout: float | None = Field(None, gt=0)
    """Seconds for an episode, including generation; --rollout-timeout applies as well."""
    on_timeout: Literal["fail", "truncate"] = "fail"
    """Action at the deadline of a step or of the episode: the sample fails, or is TRUNCATED and keeps its turns and
    their rewards. Before the end of the first step, and with reward environment, it always fails."""
    resume: Literal["snapshot", "restart", "fail"] = "snapshot"
    """Treatment of an interrupted sample. snapshot: continue from the environment's snapshot, or restart without a
    snapshot. restart: always restart. fail: the sample fails."""
    observation_role: str = "user"
    """Role of observations that are text, in chat rows."""
    observation_template: str = "{observation}"
    """Template of each observation in text rows, such as "<|user|>{observation}<|end|><|assistant|>"."""


@declares(GenerateTraits(uses_environment=True, takes_images=True))
async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext) -> Sample:
    """Play one episode.

    `max_new_tokens` counts observations too. An episode is COMPLETED if the environment ended it, and TRUNCATED if it
    ran out of tokens or turns.

    Raises:
        ConfigError: No environment is named, or an option is wrong.
        PluginError: The environment cannot be built, or raised.
        EnvironmentTimeoutError: The environment missed a deadline, and `on_timeout` is fail.
        EngineError: The engine refused the request or stopped answering.
        RolloutError: An observation has an image, and the model reads text only.
    """
    own = _options(args, sample)
    if sample.response_length >= int(sampling_params["max_new_tokens"]):
        sample.status = SampleStatus.TRUNCATED
        return sample
    drawn = sample.prompt_tokens
    role, template = own.observation_role, own.observation_template
    dialogue = Dialogue(args, context.tokenizer, sample, role=role, template=template)
    session = await EnvironmentSession.open(args, sample)
    episode = Episode(args, sample, sampling_params, context, session, dialogue, own)
    try:
        await session.limited(episode.play(), own.timeout)
    except EnvironmentTimeoutError as error:
        if own.on_timeout == "fail" or not episode.turns or episode.reward_rule == "environment":
            raise
        episode.cut(str(error))
    finally:
        if problem := await session.close():
            episode.note(close_error=problem)
    # A first observation changes the prompt, so the result is a different sample than the drawn one.
    return sample if sample.prompt_tokens == drawn else copy.copy(sample)


def _options(args: Args, sample: Sample) -> Options:
    own = options(args, "multi_turn", Options)
    row = {name: sample.metadata[name] for name in Options.model_fields if name in sample.metadata}
    return Options.model_validate({**own.model_dump(), **row}) if row else own
