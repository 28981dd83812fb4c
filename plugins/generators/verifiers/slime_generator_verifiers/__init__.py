"""Environments of the `verifiers` package (0.4, "v1"): their tasks are prompts, their rewards train.

    data source   --data-source-path verifiers                  tasks of the environment, the cursor is resumed
    generator     --custom-generate-function-path verifiers     one episode per sample; its rewards and metrics
    recipe        --prepare-path verifiers                      the missing files of --eval-prompt-data

An episode is played by verifiers itself. The model calls of its program go to verifiers' server, which records the
trace that rewards read, and on to the endpoints of `slime_core.agents`, where the tokens are ours. What a reader would
get wrong: the row's prompt is shown to nobody; the prompt that is sampled from is the program's, in the chat template.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from slime_core import DatasetSource, GenerateContext, PluginOptions, Sample, SampleStatus, options
from slime_core.errors import ConfigError
from slime_core.waits import within
from slime_generator_verifiers.environments import TaskRows, environment_of, served, task_of

if TYPE_CHECKING:
    from slime_core.agents import AgentServer

NO_KEY = "SLIME_VERIFIERS_NO_KEY"
"""Environment variable that is not set: verifiers' client sends "EMPTY" then, and the session is named in the body."""


class EpisodeTimeout(Exception):
    """The seconds of an episode are over."""


class Options(PluginOptions):
    """What a user may set: `--set plugins.verifiers.env=gsm8k-v1`."""

    env: str = ""
    """The installed package that has the tasks (verifiers' `env.taskset.id`)."""
    taskset: dict[str, Any] = Field(default_factory=dict)
    """Its own settings (`env.taskset.*`)."""
    pair: str = ""
    """Another environment to play the tasks in (`env.id`); it must have one seat that trains."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Further settings (`env.*`), the seats' among them: {"agent": {"max_turns": 4}}."""
    select: dict[str, Any] = Field(default_factory=dict)
    """Training tasks: include, exclude, shuffle, seed, skip, limit of verifiers."""
    eval_select: dict[str, Any] = Field(default_factory=dict)
    """Tasks that the recipe writes for evaluation, likewise."""
    timeout: float = Field(600.0, gt=0)
    """Seconds of an episode; at the end of them the sample fails."""


class VerifiersSource(DatasetSource):
    """The data source: `--rollout-shuffle`, `--buffer-filter-path` and so on work as with a file."""

    def open_rows(self) -> TaskRows:
        """The tasks of `select`."""
        own = options(self.args, "verifiers", Options)
        return TaskRows(json.loads(_spec(own)), own.select, _columns(self.args, self.args.input_key))


def prepare(args: Any) -> None:
    """The recipe: write the files of `--eval-prompt-data` that are missing."""
    own = options(args, "verifiers", Options)
    for path in map(Path, (args.eval_prompt_data or [])[1::2]):
        if path.exists():
            continue
        rows = TaskRows(json.loads(_spec(own)), own.eval_select, _columns(args, args.eval_input_key or args.input_key))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(json.dumps(rows[i]) + "\n" for i in range(len(rows))), encoding="utf-8")
        partial.replace(path)


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext
) -> list[Sample]:
    """Play one episode of the sample's task.

    Returns:
        The trajectories of the episode, which share a `rollout_id` and have the episode's reward each; one FAILED
        sample where the episode failed; one ABORTED sample, without response, when the framework interrupted.

    Raises:
        ConfigError: There is no such environment, the row is none of its tasks, or several of its seats train.
    """
    from slime_core.agents import SessionLimits, serving  # an HTTP server: not for `slime plugins list`

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
        session = server.open_session(sample, sampling_params, limits=limits, evaluation=context.evaluation)
        try:
            episode, problem = await _play(spec, task, server, session.key, own.timeout)
            reward, notes = (None, {}) if episode is None else _outcome(episode)
            samples = await server.finish_session(session.key, reward)
        finally:
            await server.drop_session(session.key)
    outside = max(0.0, time.monotonic() - started - session.engine_seconds)
    for each in samples:
        each.non_generation_time = outside / len(samples)
        each.metadata["verifiers"] = {**each.metadata["verifiers"], **notes}
        problem = problem or "; ".join(notes.get("errors", []))
        if problem and each.status is not SampleStatus.ABORTED:
            each.fail("verifiers", problem)
    return samples


async def _play(spec: str, task: Any, server: AgentServer, key: str, timeout: float) -> tuple[Any, str]:
    """(the episode, ""), or (None, why there is none)."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.types import SamplingConfig

    context = ModelContext(
        model="policy",
        client=EvalClientConfig(base_url=f"{server.url}/v1", api_key_var=NO_KEY),
        sampling=SamplingConfig.model_validate({"metadata": {"session_id": key}}),
    )

    async def episode() -> Any:
        async with served(spec) as environment:
            return await environment.run_episode(task, context)

    try:
        done = await within(
            episode(), "an episode of verifiers", deadline=timeout, then="the sample fails", error=EpisodeTimeout
        )
    except EpisodeTimeout as error:
        return None, str(error)
    return done, ""


def _outcome(episode: Any) -> tuple[float | None, dict[str, Any]]:
    """(the reward, what the sample's metadata keeps). Raises ConfigError when several seats trained."""
    trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    if len(trained) > 1:
        names = ", ".join(sorted({trace.agent.name or "agent" for trace in trained}))
        raise ConfigError(
            f"plugins.verifiers: an episode had {len(trained)} runs that train ({names}), whose rewards differ; one is"
            " supported. Give the other seats a client of their own, or choose an environment with one"
        )
    errors = [f"{error.type}: {error.message}" for error in episode.errors] if not episode.ok else []
    notes: dict[str, Any] = {"errors": errors}
    if not trained:
        return None, notes
    trace = trained[0]
    if not trace.ok:
        errors += [f"{error.type}: {error.message}" for error in trace.errors] or [
            f"it ended by {trace.stop_condition}"
        ]
    notes["rewards"] = {name: None if given is None else given.value for name, given in trace.rewards.items()}
    notes["metrics"] = dict(trace.metrics)
    notes["stop"] = trace.stop_condition
    return float(trace.reward), notes


def _spec(own: Options) -> str:
    if not own.env:
        raise ConfigError("plugins.verifiers.env: name an installed environment, --set plugins.verifiers.env=NAME")
    return json.dumps({"id": own.pair, "taskset": {**own.taskset, "id": own.env}, "config": own.config}, sort_keys=True)


def _columns(args: Any, input_key: str) -> dict[str, str]:
    return {"input": input_key, "metadata": args.metadata_key}
