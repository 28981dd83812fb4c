"""Environments of the `verifiers` package (0.4, "v1"): their tasks are prompts, their rewards train.

    data source   --data-source-path verifiers                  tasks of the environment, the cursor is resumed
    generator     --custom-generate-function-path verifiers     one episode per sample; its rewards and metrics
    recipe        --prepare-path verifiers                      the missing files of --eval-prompt-data

The verifiers package plays the episode. The model calls of its programs go to verifiers' server, which records the
trace for the rewards. The server forwards them to the endpoints of `slime_agent_base_url`, which record the tokens; the
trace's id names the session. The row's prompt is not used: the model samples from the program's prompt in the chat
template.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from slime_core import Args, DatasetSource, GenerateContext, PluginOptions, Sample, options, write_lines
from slime_core.errors import ConfigError
from slime_core.waits import within
from slime_generators.verifiers.environments import TaskRows, environment_of, served, task_of

if TYPE_CHECKING:
    from slime_agent_base_url import AgentServer, SessionLimits

NO_KEY = "SLIME_VERIFIERS_NO_KEY"
"""Name of a variable that is never set: verifiers' client then sends "EMPTY", and the trace's id in `X-Session-ID`."""


class EpisodeTimeout(Exception):
    """Raised if an episode exceeds its time limit."""


class Options(PluginOptions):
    """The user's settings, such as `--set plugins.verifiers.env=gsm8k-v1`."""

    env: str = ""
    """Installed package that has the tasks (verifiers' `env.taskset.id`)."""
    taskset: dict[str, Any] = Field(default_factory=dict)
    """Settings of the tasks (`env.taskset.*`)."""
    pair: str = ""
    """Another environment to play the tasks in (`env.id`), which may have several seats."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Further settings (`env.*`), including those of the seats: {"agent": {"max_turns": 4}}."""
    select: dict[str, Any] = Field(default_factory=dict)
    """Selection of the training tasks: include, exclude, shuffle, seed, skip, limit of verifiers."""
    eval_select: dict[str, Any] = Field(default_factory=dict)
    """Selection of the tasks that the recipe writes for evaluation, in the same format."""
    timeout: float = Field(600.0, gt=0)
    """Time limit of an episode in seconds; then the sample fails."""


class VerifiersSource(DatasetSource):
    """The data source of tasks: `--rollout-shuffle`, `--buffer-filter-path` and so on work as with a file."""

    def open_rows(self) -> TaskRows:
        """Return the tasks of `select`."""
        own = options(self.args, "verifiers", Options)
        return TaskRows(json.loads(_spec(own)), own.select, _columns(self.args, self.args.input_key))


def prepare(args: Args) -> None:
    """Write the missing files of `--eval-prompt-data`; this is the recipe."""
    own = options(args, "verifiers", Options)
    for path in map(Path, (args.eval_prompt_data or [])[1::2]):
        if path.exists():
            continue
        rows = TaskRows(json.loads(_spec(own)), own.eval_select, _columns(args, args.eval_input_key or args.input_key))
        write_lines(path, (json.dumps(rows[i]).encode() for i in range(len(rows))))


async def generate(
    args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext
) -> list[Sample]:
    """Play one episode of the sample's task.

    Returns:
        The trajectories of all runs that train. They share a `rollout_id`, each has the reward of its run, and they are
        FAILED if the run failed. If no token was sampled, a single FAILED sample; if the rollout was interrupted, a
        single ABORTED sample without response.

    Raises:
        ConfigError: There is no such environment, or the row is not a task of it.
    """
    from slime_agent_base_url import SessionLimits, serving  # an HTTP server: not for `slime plugins list`

    own = options(args, "verifiers", Options)
    data = sample.metadata.get("verifiers", {}).get("task")
    if not isinstance(data, dict):
        raise ConfigError(
            f"sample {sample.index} is no task of verifiers (metadata has no 'verifiers'); tasks come from"
            " --data-source-path verifiers, or from a file that --prepare-path verifiers wrote"
        )
    spec, started = _spec(own), time.monotonic()
    task = task_of(environment_of(spec), data)
    limits = SessionLimits(max_turns=1 << 20, max_response_tokens=int(sampling_params["max_new_tokens"]))
    async with serving(args, context) as server:
        runs = _Runs(server, sample, sampling_params, limits, evaluation=context.evaluation)
        try:
            problem = await _play(spec, task, server, runs, own.timeout)
            samples = await runs.finish(problem)
        finally:
            await runs.close()
    outside = max(0.0, time.monotonic() - started - runs.engine_seconds)
    for each in samples:
        each.non_generation_time = outside / len(samples)
    return samples


class _Runs:
    """The runs of an episode: a session for each trace that verifiers makes, named by the trace's id."""

    def __init__(
        self, server: AgentServer, base: Sample, params: Mapping[str, Any], limits: SessionLimits, *, evaluation: bool
    ) -> None:
        self.server, self.base, self.params, self.limits, self.evaluation = server, base, params, limits, evaluation
        self.traces: dict[str, Any] = {}
        self.discarded: set[str] = set()
        self.aborted = asyncio.Event()
        """Event shared by the sessions: an interruption of one session ends the episode."""
        self.engine_seconds = 0.0

    def begin(self, trace: Any) -> None:
        """Begin a run; called before the run does anything."""
        session = self.server.open_session(
            self.base, self.params, key=trace.id, limits=self.limits, evaluation=self.evaluation
        )
        session.aborted = self.aborted
        self.traces[trace.id] = trace

    def discard(self, trace: Any) -> None:
        """Discard a failed run, which verifiers restarts."""
        self.discarded.add(trace.id)

    async def finish(self, problem: str) -> list[Sample]:
        """The samples of the episode, see `generate`; `problem` is why all of it failed, or ""."""
        sessions = {key: self.server.sessions[key] for key in self.traces}
        self.engine_seconds = sum(session.engine_seconds for session in sessions.values())
        if self.aborted.is_set():
            return await self.server.finish_session(next(iter(sessions)))
        trained = [key for key in self.traces if self.traces[key].agent.trainable and key not in self.discarded]
        # A seat with a client of its own asks us for nothing.
        played = [key for key in trained if sessions[key].turns or not self.traces[key].ok] or trained[:1]
        if not played:
            failed = copy.deepcopy(self.base)
            failed.fail("verifiers", problem or "no run of the episode trains")
            return [failed]
        samples = []
        for key in played:
            reward, notes = _outcome(self.traces[key])
            for each in await self.server.finish_session(key, reward):
                each.rollout_id = self.base.index if self.base.rollout_id is None else self.base.rollout_id
                each.metadata["verifiers"] = {**each.metadata["verifiers"], **notes}
                each.reward_components = {n: v for n, v in notes["rewards"].items() if v is not None} or None
                if notes["seat"] != "agent":
                    each.turns = [turn._replace(role=notes["seat"]) for turn in each.known_turns()]
                each.metadata["sample_metrics"] = {**each.metadata.get("sample_metrics", {}), **_metrics(notes)}
                reason = problem or "; ".join(notes["errors"])
                if reason:
                    each.fail("verifiers", reason)
                samples.append(each)
        return samples

    async def close(self) -> None:
        """Close the remaining sessions."""
        for key in self.traces:
            await self.server.drop_session(key)


async def _play(spec: str, task: Any, server: AgentServer, runs: _Runs, timeout: float) -> str:
    """Play the episode; why all of it failed, or ""."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    client = EvalClientConfig(base_url=f"{server.url}/v1", api_key_var=NO_KEY)
    context = ModelContext(model="policy", client=client)

    async def play() -> Any:
        async with served(spec) as environment:
            return await environment.run_episode(task, context, on_trace=runs.begin, on_discard=runs.discard)

    try:
        episode = await within(
            play(), "an episode of verifiers", deadline=timeout, then="the sample fails", error=EpisodeTimeout
        )
    except EpisodeTimeout as error:
        return str(error)
    return "; ".join(f"{error.type}: {error.message}" for error in episode.errors if not episode.ok)


def _outcome(trace: Any) -> tuple[float, dict[str, Any]]:
    """Return (reward of the run, notes for its samples' metadata)."""
    errors: list[str] = []
    if not trace.ok:
        errors = [f"{e.type}: {e.message}" for e in trace.errors] or [f"it ended by {trace.stop_condition}"]
    rewards = {name: None if given is None else given.value for name, given in trace.rewards.items()}
    notes = {"rewards": rewards, "metrics": dict(trace.metrics), "stop": trace.stop_condition, "errors": errors}
    return float(trace.reward), {**notes, "seat": trace.agent.name}


def _metrics(notes: Mapping[str, Any]) -> dict[str, float]:
    """Return `verifiers/reward/NAME` and `verifiers/metric/NAME`; `verifiers/SEAT/...` if seats have names."""
    start = "verifiers" if notes["seat"] == "agent" else f"verifiers/{notes['seat']}"
    kinds = (("reward", notes["rewards"]), ("metric", notes["metrics"]))
    return {f"{start}/{kind}/{name}": v for kind, values in kinds for name, v in values.items() if v is not None}


def _spec(own: Options) -> str:
    if not own.env:
        raise ConfigError("plugins.verifiers.env: name an installed environment, --set plugins.verifiers.env=NAME")
    return json.dumps({"id": own.pair, "taskset": {**own.taskset, "id": own.env}, "config": own.config}, sort_keys=True)


def _columns(args: Args, input_key: str | None) -> dict[str, str]:
    return {"input": input_key or "input", "metadata": args.metadata_key}
