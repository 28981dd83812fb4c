"""Play an episode: the loop of turn, step and observation, and the record from which an interrupted one resumes.

    begin ----> turn (engine) ----> step (environment) ----> observation --+
     ^ |          | abort                | done, or out of turns           | out of tokens
     | |          v                      v                                 v
     | +----------|------------------ finished                          finished
     +--- record in metadata["environment"]: turns, rewards, snapshot

The record is updated in the order of events, so it is consistent after a cancellation at any point. While `acting` is
set, the turn is complete and its step is not; `snapshot` is then the state before the step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime_core import Args, GenerateContext, Sample, SampleStatus, Turn
from slime_core.errors import DataError, PluginError

if TYPE_CHECKING:
    from slime_environments.session import Dialogue, EnvironmentSession

    from slime_core import Step
    from slime_generators.multi_turn import Options

KEY = "environment"
"""Key of the record in `Sample.metadata`."""
_WORKING = ("messages", "snapshot", "turn_start", "acting", "state")
"""Entries of the record that only an unfinished sample needs."""


class Episode:
    """The episode of one sample in one environment."""

    def __init__(
        self,
        args: Args,
        sample: Sample,
        sampling_params: Mapping[str, Any],
        context: GenerateContext,
        session: EnvironmentSession,
        dialogue: Dialogue,
        own: Options,
    ) -> None:
        self._args, self._sample, self._params = args, sample, sampling_params
        self._engine, self._tokenizer = context.engine, context.tokenizer
        self._session, self._dialogue, self._own = session, dialogue, own
        self._limit = int(sampling_params["max_new_tokens"])
        self.reward_rule = own.reward or _rule_without(args, sample)
        if self.reward_rule == "environment" and not session.scores:
            raise PluginError(f"{session.label} has no method score(sample), which reward 'environment' asks for")
        self._record: dict[str, Any] = {}

    @property
    def turns(self) -> int:
        """Number of completed steps."""
        return int(self._record.get("turns", 0))

    def note(self, **facts: Any) -> None:
        """Add entries to the record."""
        self._record.update(facts)

    async def play(self) -> None:
        """Play from the beginning or the last interruption to the end or the next interruption."""
        await self._begin()
        while True:
            if not self._record["acting"] and not await self._turn():
                return
            step = await self._step()
            if step.done:
                return await self._finish("done", SampleStatus.COMPLETED)
            if self.turns >= self._own.max_turns:
                return await self._finish("max_turns", SampleStatus.TRUNCATED)
            if not self._observe(step):
                return await self._finish("length", SampleStatus.TRUNCATED)

    def cut(self, reason: str) -> None:
        """End the episode with the turns so far, after a deadline has passed."""
        self._sample.status = SampleStatus.TRUNCATED
        self._seal("timeout", timeout=reason)
        self._sample.reward = self._reward()

    # -- beginning -----------------------------------------------------------------------------------

    async def _begin(self) -> None:
        sample, before = self._sample, self._sample.metadata.get(KEY) or {}
        partial = sample.response_length > 0
        policy = self._own.resume
        if partial and policy == "fail":
            raise PluginError("the sample was interrupted, and resume = 'fail' (plugins.multi_turn.resume)")
        goes_on = partial and policy == "snapshot"
        if goes_on and self._session.resumable and before.get("snapshot") is not None:
            self._take(before)
            await self._timed(self._session.restore(sample, before["snapshot"], self.turns))
            self._dialogue.messages = list(before.get("messages", []))
            return
        observation = await self._timed(self._session.reset(sample))
        if goes_on and self._is_where_it_was(before, observation):
            self._take(before)
            self._dialogue.open(observation)
            await self._keep_state()
            return
        restarts = list(before.get("restarts", [])) if partial else []
        if partial:
            restarts.append(self._why_again(before))
            sample.reset_for_retry()
        if partial or observation:
            sample.tokens, sample.spans = self._dialogue.opening(observation)
        self._take({"restarts": restarts} if restarts else {})
        self._dialogue.open(observation)
        await self._keep_state()

    def _take(self, before: Mapping[str, Any]) -> None:
        fresh = {"turns": 0, "rewards": [], "info": {}, "turn_start": 0, "acting": False, "state": None}
        self._record = {**fresh, **before}
        self._sample.metadata[KEY] = self._record

    def _is_where_it_was(self, before: Mapping[str, Any], observation: Any) -> bool:
        """Return True if the earlier environment had no steps yet, and this one has the same first observation."""
        first_turn = not before.get("turns") and all(version >= 0 for version in self._sample.token_weight_versions)
        return first_turn and self._dialogue.opening(observation)[0] == self._sample.prompt_tokens

    def _why_again(self, before: Mapping[str, Any]) -> str:
        if self._own.resume == "restart":
            return "resume = 'restart'"
        if before and not before.get("turns"):
            return "reset showed something else than before"
        if not self._session.resumable:
            return f"{self._session.label} has no snapshot and restore"
        if not before:
            return "the sample has a response that no episode is recorded of"
        return "no snapshot was kept"

    async def _keep_state(self) -> None:
        self._record["state"] = self._session.state
        self._record["snapshot"] = await self._session.snapshot()
        self._record["messages"] = list(self._dialogue.messages)

    # -- one turn ------------------------------------------------------------------------------------

    async def _turn(self) -> bool:
        """Generate a turn of the policy; return False if the sample is finished or aborted."""
        sample, own = self._sample, self._own
        room = self._limit - sample.response_length
        if room <= 0:
            await self._finish("length", SampleStatus.TRUNCATED)
            return False
        if own.max_turn_tokens is not None:
            room = min(room, max(1, own.max_turn_tokens - (sample.response_length - self._record["turn_start"])))
        images: Any = {"image_data": sample.image_data()} if sample.multimodal_inputs else {}
        output = await self._engine.generate(
            sample.tokens, {**self._params, "max_new_tokens": room}, session_id=sample.session_id, **images
        )
        sample.append_response_tokens(
            self._args, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
        )
        if sample.status == SampleStatus.ABORTED:
            return False
        if sample.status == SampleStatus.TRUNCATED and sample.response_length >= self._limit:
            await self._finish("length", SampleStatus.TRUNCATED)  # an incomplete action is not executed
            return False
        self._record["cut"] = sample.status == SampleStatus.TRUNCATED
        self._record["acting"], sample.status = True, SampleStatus.PENDING
        return True

    async def _step(self) -> Step:
        ids = self._turn_ids()
        turn = Turn(
            number=self.turns,
            raw=self._tokenizer.decode(ids, skip_special_tokens=False),
            token_ids=ids,
            finish_reason="length" if self._record.get("cut") else "stop",
        )
        action = self._tokenizer.decode(ids, skip_special_tokens=True)
        step: Step = await self._timed(self._session.step(action, turn))
        snapshot = await self._timed(self._session.snapshot()) if not step.done else None
        self._sample.end_turn(step.reward, state=self._record["state"])
        self._record["turns"] += 1
        self._record["state"] = step.state
        self._record["rewards"].append(step.reward)
        parts = {} if self.reward_rule == "last" else dict(self._sample.reward_components or {})
        for name, value in step.components.items():
            parts[name] = parts.get(name, 0.0) + value
        self._sample.reward_components = parts or None
        self._record["info"].update(step.info)
        self._record["snapshot"] = snapshot
        return step

    def _observe(self, step: Step) -> bool:
        """Append the observation; return False if it leaves no room for a further turn."""
        sample, ids = self._sample, self._turn_ids()
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        pieces = self._dialogue.continued(text, ids, step.observation)
        if not any(ids for ids, _ in pieces):
            raise DataError(
                f"{self._session.label} answered step {self.turns} with nothing to see, and is not done; the policy"
                " cannot go on behind the end of its own turn"
            )
        if sample.response_length + sum(len(ids) for ids, _ in pieces) >= self._limit:
            return False
        for ids, source in pieces:
            sample.append_response_tokens(
                self._args, ids, trainable=False, source=source, text=self._tokenizer.decode(ids)
            )
        self._dialogue.attach_images()
        self._record["turn_start"], self._record["acting"] = sample.response_length, False
        self._record["messages"] = list(self._dialogue.messages)
        return True

    def _turn_ids(self) -> list[int]:
        return self._sample.response_tokens[self._record["turn_start"] :]

    # -- the end -------------------------------------------------------------------------------------

    async def _finish(self, ended: str, status: SampleStatus) -> None:
        sample = self._sample
        sample.status = status
        self._seal(ended)
        if self.reward_rule == "environment":
            reward = await self._timed(self._session.score(sample))
            sample.reward = dict(reward) if isinstance(reward, Mapping) else reward
        else:
            sample.reward = self._reward()

    def _reward(self) -> float | None:
        """Return the reward of the steps, or None if the run's reward function scores the sample."""
        rewards: list[float] = self._record["rewards"]
        if self.reward_rule == "none":
            return None
        return float(sum(rewards if self.reward_rule == "sum" else rewards[-1:]))

    def _seal(self, ended: str, **facts: Any) -> None:
        for name in (*_WORKING, "cut"):
            self._record.pop(name, None)
        self._record.update(ended=ended, **facts)
        self._sample.metadata["num_turns"] = self.turns

    async def _timed(self, call: Any) -> Any:
        started = time.monotonic()
        try:
            return await call
        finally:
            self._sample.non_generation_time += time.monotonic() - started


def _rule_without(args: Args, sample: Sample) -> str:
    """Return the default reward rule: "none" if a reward function is set, else "sum" of the steps."""
    named = (
        args.rm_type, args.custom_rm_path, sample.custom_rm_path,
        sample.metadata.get("rm_type"), sample.metadata.get("custom_rm_path"),
    )  # fmt: skip
    return "none" if any(named) else "sum"
