"""Roles that answer one another: a prompt gives one trajectory per role, fan-out siblings with one `rollout_id`.

::

    solver   prompt | answer 1 | "A critic says: ..." | answer 2      the given sample
    critic            prompt with answer 1 | critique                 a sibling

An interrupted conversation comes back as the given sample alone, ABORTED, with the other roles' samples in its
metadata; only a conversation that has ended fans out.
"""

from __future__ import annotations

import inspect
from typing import Any

from slime_core import Args, GenerateContext, GenerateTraits, RewardCaller, Sample, SampleStatus, declares, resolve
from slime_generators.multi_agent.options import QUESTION, Options, Role, adapter_of, check, options_of
from slime_generators.multi_agent.trajectories import Trajectory, question_of, sibling

__all__ = ["Options", "Role", "generate"]

STATE = "multi_agent"
"""Metadata key of the state of an interrupted conversation."""


@declares(GenerateTraits(check=check))
async def generate(
    args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext
) -> Sample | list[Sample]:
    """Let the roles speak in turn; a turn that is cut at its limit ends the conversation.

    `max_new_tokens` bounds each role's response, text inserted between its turns included.

    Raises:
        ValueError: The sample has no prompt tokens.
        ConfigError: The options contradict each other, or the question cannot be read from the row.
        DataError: The chat template refuses a role's messages.
        EngineError: The engine refused the request or stopped answering.
    """
    if not sample.tokens:
        raise ValueError(f"sample {sample.index} has no prompt tokens; the data source sets `Sample.tokens`")
    chosen = options_of(args)
    talk = _Talk(args, sample, context, chosen)
    ended = await talk.go_on(sampling_params)
    if not ended:
        return talk.interrupted()
    samples = talk.finished()
    await _reward(args, chosen, samples, context)
    return list(samples.values())


class _Talk:
    """A conversation: the current turn, and the answers of all roles."""

    def __init__(self, args: Args, sample: Sample, context: GenerateContext, chosen: Options) -> None:
        self._origin, self._chosen = sample, chosen
        state = sample.metadata.get(STATE) or {}
        if not sample.response_length:  # an earlier response was dropped; the prompt is already the first role's
            state = {"said": {name: text for name, text in state.get("said", {}).items() if name == QUESTION}}
            sample.metadata.pop("num_turns", None)
        self.position = int(state.get("position", 0))
        """Number of finished turns."""
        self.is_open = bool(state.get("open", bool(sample.response_length)))
        """True if the current turn has begun."""
        self.said: dict[str, str] = dict(state.get("said", {}))
        others = {name: Sample.from_dict(told) for name, told in state.get("others", {}).items()}
        self._trajectories: dict[str, Trajectory] = {}
        if any(role.prompt or role.again for role in chosen.roles):
            self.said.setdefault(QUESTION, question_of(args, sample))
        for number, role in enumerate(chosen.roles):
            own = sample if number == 0 else others.get(role.name) or sibling(sample, role)
            own.metadata["role"] = role.name
            if (adapter := adapter_of(args, role)) is not None:
                own.train_metadata = {**(own.train_metadata or {}), "adapter": adapter}
            self._trajectories[role.name] = Trajectory(args, role, own, context)

    async def go_on(self, params: dict[str, Any]) -> bool:
        """Continue the conversation to its end; return False if the engine was interrupted."""
        turns = self._chosen.turns()
        while self.position < len(turns):
            speaker = self._trajectories[turns[self.position]]
            if not self.is_open:
                speaker.prepare(self.said)
                self.is_open = True
            self._keep_state()
            finished = await speaker.speak(params)
            if speaker.sample.status == SampleStatus.ABORTED:
                return False
            self.said[speaker.role.name] = speaker.answer()
            self.position, self.is_open = self.position + 1, False
            if not finished:
                break
        return True

    def interrupted(self) -> Sample:
        """Return the given sample, with all state needed to continue."""
        self._keep_state()
        self._origin.status = SampleStatus.ABORTED
        return self._origin

    def _keep_state(self) -> None:
        """Write the state into the given sample, which may be copied or cancelled at any time."""
        _, *others = self._trajectories.values()
        self._origin.metadata[STATE] = {
            "position": self.position,
            "open": self.is_open,
            "said": dict(self.said),
            "others": {other.role.name: other.sample.to_dict() for other in others},
        }

    def finished(self) -> dict[str, Sample]:
        """Return the samples of the roles that have spoken, the last speaker's last."""
        self._origin.metadata.pop(STATE, None)
        turns = self._chosen.turns()[: self.position]
        spoke = [name for name in self._trajectories if name in turns]
        samples = {name: self._trajectories[name].sample for name in spoke}
        for name, own in samples.items():
            own.rollout_id = self._origin.index if self._origin.rollout_id is None else self._origin.rollout_id
            own.remove_sample = own.remove_sample or not self._chosen.role(name).trainable
            own.metadata["last_speaker"] = turns[-1]
        return samples


async def _reward(args: Args, chosen: Options, samples: dict[str, Sample], context: GenerateContext) -> None:
    """Give every role a reward: the last answer's reward, or the result of the user's function."""
    last = samples[next(iter(samples.values())).metadata["last_speaker"]]
    spec = last.custom_rm_path or last.metadata.get("rm_type") or args_spec(args)
    final = None
    if spec:
        caller = RewardCaller(resolve("rewards", spec, origin="multi_agent"), args)
        (final,) = await caller.score([last], evaluation=context.evaluation)
    rewards: Any = dict.fromkeys(samples, final)
    if chosen.reward_path is not None:
        function = resolve("functions", chosen.reward_path, origin="plugins.multi_agent.reward_path").obj
        rewards = function(args, dict(samples), final)
        rewards = await rewards if inspect.isawaitable(rewards) else rewards
        if set(rewards) != set(samples):
            raise ValueError(f"{chosen.reward_path} returned rewards of {sorted(rewards)}; expected {sorted(samples)}")
    for name, own in samples.items():
        own.reward = rewards[name]


def args_spec(args: Args) -> str | None:
    """Return the run's reward: `--custom-rm-path`, else `--rm-type`."""
    return args.custom_rm_path or args.rm_type
