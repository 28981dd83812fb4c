"""Make of every sample a lesson: log-probs of a teacher on a server, and a prompt of the teacher that says more.

`--use-opd --opd-type sglang` reads `sample.teacher_log_probs`, which this sets; the loss `distillation` also reads the
teacher's likeliest tokens (`asking.py`). With `--opd-type local` and `self` the trainer asks the teacher; this reward
then only writes the teacher's prompts (`context.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from slime_engine_sglang import get_model_url, planned_models
from slime_estimators.distillation import TEACHER, TEACHER_PROMPT, number_of_ids, pack_likeliest

from slime_core import Args, PluginOptions, RewardCaller, RewardTraits, options, resolve
from slime_core.errors import ConfigError, PluginError
from slime_core.sample import Sample
from slime_rewards.on_policy_distillation.asking import request, said
from slime_rewards.on_policy_distillation.context import Contexts, fields_of
from slime_rewards.remote import JsonClient

MODEL = "teacher"
"""Name of the model in --sglang-config that is asked where --rm-url names none."""
ATTEMPTS = 4
"""Requests made before the sample fails; refused connections and 5xx answers are repeated, --rm-timeout bounds all."""
CONNECTIONS = 256
"""Requests at a time; the teacher batches them."""
NAME = "on_policy_distillation"
_WHERE = {
    "megatron": "with --opd-type local the trainer holds the teachers; give a path, or use --opd-type sglang",
    "self": "with --opd-type self the actor is the teacher; use --opd-type local or sglang",
    "sglang": "a path is for --opd-type local; give a url, as of `slime serve`",
}
"""Value of --opd-type -> why a teacher does not fit it."""


class Teacher(BaseModel):
    """A teacher on a server, or in the trainer."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    url: str | None = None
    """Address, with or without /generate (SGLang, slime serve); with /v1/completions for vLLM."""
    model: str | None = None
    """Model of --sglang-config, instead of an address."""
    path: str | None = None
    """Model, commit or run directory that the trainer loads, with --opd-type local."""
    adapter: str | None = None
    """Name of an adapter that the server has loaded."""

    @field_validator("url")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc):
            raise ValueError(f"{url!r} is no address; write http://HOST:PORT")
        return url

    @model_validator(mode="after")
    def _one(self) -> Teacher:
        if (self.url, self.model, self.path).count(None) != 2:
            raise ValueError("a teacher has a url, a model or a path, one of the three")
        if self.path is not None and self.adapter is not None:
            raise ValueError("adapter is a server's; the path of a run's commit is its model with the adapter")
        return self


class Options(PluginOptions):
    """`plugins: {on_policy_distillation: {...}}`."""

    teachers: dict[str, Teacher] = Field(default_factory=dict)
    """Teachers by name: {url or model, adapter}, or {path} with --opd-type local; a row without a name goes to
    --rm-url, or to --opd-teacher-load."""
    route: str = "teacher"
    """Entry of a row's metadata that names its teacher."""
    reward: str | None = None
    """Reward that scores the samples, like the value of --custom-rm-path; 0 when not given."""
    context: list[str] = Field(default_factory=list)
    """Prompts of a teacher that sees more, the first whose {fields} a sample has: prompt, label, peer, metadata's."""
    peer_reward: float = 1.0
    """Least reward of a response that may be shown as {peer}."""

    @field_validator("context", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @field_validator("context")
    @classmethod
    def _readable(cls, given: list[str]) -> list[str]:
        for template in given:
            fields_of(template)
        return given


class TeacherLogProbs:
    """Reward 0.0 for every sample, or that of the option `reward`; the teacher's part is set on the way.

    Evaluation asks no teacher; without `reward`, name a reward of its own for every evaluation data set.

    Args:
        args: `rm_url` is the teacher's address, with or without `/generate`; without one, `sglang_config` has a model
            named "teacher", or every row names one of the option `teachers`.

    Raises:
        ConfigError: There is no teacher, or nothing for this reward to do.
    """

    Options = Options

    def __init__(self, args: Args) -> None:
        self._chosen = chosen = options(args, NAME, Options)
        self._serves = args.opd_type in ("sglang", None)
        self._default = _default(args) if self._serves else None
        if self._serves and self._default is None and not chosen.teachers:
            raise ConfigError(
                "reward 'on_policy_distillation' needs --rm-url URL, an engine with SGLang's /generate, or a model"
                f" named {MODEL!r} in the file of --sglang-config, or plugins.{NAME}.teachers"
            )
        for name, teacher in chosen.teachers.items():
            where = f"plugins.{NAME}.teachers.{name}"
            if args.opd_type == "self" or (teacher.path is None) != self._serves:
                raise ConfigError(f"{where}: {_WHERE[args.opd_type or 'sglang']}")
            if teacher.model is not None and teacher.model not in (known := planned_models(args)):
                raise ConfigError(
                    f"{where}.model {teacher.model!r}: --sglang-config has {', '.join(known) or 'no models'}"
                )
        if not self._serves and not chosen.context and not chosen.teachers:
            raise ConfigError(
                f"reward {NAME!r} with --opd-type {args.opd_type} only shows the teacher more than the policy, or takes"
                f" several teachers; type --set 'plugins.{NAME}.context=\"{{prompt}} Answer: {{label}}\"', with"
                f" --opd-type local give plugins.{NAME}.teachers, or choose another reward"
            )
        self._number = number_of_ids(args)
        self._contexts = Contexts(args, chosen.context, chosen.peer_reward) if chosen.context else None
        self.members = [] if chosen.reward is None else [_member(chosen.reward)]
        """The resolved reward, for the run's provenance."""
        self._inner = [RewardCaller(member, args) for member in self.members]
        self.traits = RewardTraits(
            scores_groups=bool(self._contexts and self._contexts.reads_peers)
            or any(caller.scores_groups for caller in self._inner)
        )
        self._client = JsonClient(connections=CONNECTIONS, attempts=ATTEMPTS)

    async def __call__(self, args: Args, samples: list[Sample], evaluation: bool = False) -> list[Any]:
        """Score the samples, and set what the teacher sees and says.

        Raises:
            PluginError: The teacher refused, could not be reached, or scored other tokens than the sample's; or a row
                names no teacher.
            EngineError: It is a model of this run, whose engine serves none.
        """
        values = await self._scored(samples, evaluation)
        if evaluation:
            return values
        rewards = [(sample, _number(value, args)) for sample, value in zip(samples, values)]
        await asyncio.gather(*(self._teach(args, sample, rewards) for sample in samples if sample.response_length))
        return values

    async def _scored(self, samples: list[Sample], evaluation: bool) -> list[Any]:
        for caller in self._inner:
            if caller.batched:
                return list(await caller.score(samples, evaluation))
            parts = await asyncio.gather(*(caller.score([sample], evaluation) for sample in samples))
            return [value for part in parts for value in part]
        return [0.0] * len(samples)

    async def _teach(self, args: Args, sample: Sample, rewards: Sequence[tuple[Sample, float]]) -> None:
        prompt = None
        if self._contexts is not None:
            prompt = self._contexts.prompt_of(sample, rewards)
            metrics = sample.metadata.get("sample_metrics", {})
            sample.metadata["sample_metrics"] = {**metrics, "teacher_context": float(prompt is not None)}
            if not self._serves:
                sample.train_metadata = {**(sample.train_metadata or {}), TEACHER_PROMPT: prompt}
        name = self._name_of(sample)
        if not self._serves:
            if name is not None:
                sample.train_metadata = {**(sample.train_metadata or {}), TEACHER: name}
        else:
            url, adapter = self._address_of(args, name)
            tokens = [*(sample.prompt_tokens if prompt is None else prompt), *sample.response_tokens]
            body = request(
                url, tokens, sample.response_length,
                temperature=args.rollout_temperature, number=self._number, adapter=adapter,
            )  # fmt: skip
            answer = await self._client.post(url, body)
            found = said(answer, sample, self._number)
            sample.teacher_log_probs = found.log_probs
            if self._number:
                packed = pack_likeliest(found.top, self._number)
                sample.train_metadata = {**(sample.train_metadata or {}), **packed}

    def _name_of(self, sample: Sample) -> str | None:
        """Return the name of the sample's teacher; None for the default. Raises PluginError for an unknown one."""
        name, teachers = sample.metadata.get(self._chosen.route), self._chosen.teachers
        if isinstance(name, str) and name in teachers:
            return name
        in_trainer = not self._serves and (name is None or not teachers)
        if in_trainer or (name is None and self._default is not None):
            return None
        raise PluginError(
            f"sample {sample.index}: metadata[{self._chosen.route!r}] is {name!r}; plugins.{NAME}.teachers has"
            f" {', '.join(map(repr, teachers)) or 'none'}"
        )

    def _address_of(self, args: Args, name: str | None) -> tuple[str, str | None]:
        """Return address and adapter of a teacher on a server."""
        teacher = self._default if name is None else self._chosen.teachers[name]
        assert teacher is not None, "every sample has a name, or there is a default"
        return _address(args, teacher), teacher.adapter


def _default(args: Args) -> Teacher | None:
    """Return the teacher of rows that name none."""
    if args.rm_url:
        return Teacher(url=str(args.rm_url))
    return Teacher(model=MODEL) if MODEL in planned_models(args) else None


def _address(args: Args, teacher: Teacher) -> str:
    if teacher.model is not None:
        return get_model_url(args, teacher.model)
    url = str(teacher.url)
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/generate"


def _member(spec: str) -> Any:
    origin = f"plugins.{NAME}.reward"
    member = resolve("rewards", spec, origin=origin)
    if member.obj is TeacherLogProbs:
        raise ConfigError(f"{origin} {spec!r}: name the reward that scores the samples")
    return member


def _number(value: Any, args: Args) -> float:
    """Return a reward as a number; NaN for a mapping that no key reads."""
    if isinstance(value, Mapping):
        value = value.get(args.reward_key or "")
    return math.nan if value is None else float(value)


def post_process_rewards(args: Args, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """THUDM/slime's second half, for rewards that return the engine's answer itself.

    Sets `teacher_log_probs` from the answers in `sample.reward`; both the raw and the shaped rewards are 0.0.

    Raises:
        PluginError: A sample has neither an answer nor teacher log-probs.
    """
    for sample in (sample for sample in samples if sample.response_length):
        if isinstance(sample.reward, Mapping):
            sample.teacher_log_probs = teacher_log_probs(sample.reward, sample)
        elif sample.teacher_log_probs is None:
            raise PluginError(
                f"sample {sample.index} has no teacher log-probs; type --custom-rm-path on_policy_distillation"
            )
    return [0.0] * len(samples), [0.0] * len(samples)


def teacher_log_probs(answer: Mapping[str, Any], sample: Sample) -> list[float]:
    """Return [response_length] log-probs from SGLang's answer; see `asking.said`."""
    return said(answer, sample).log_probs
