"""`GenerateState` and `RouterEngine`: the state that `slime.rollout.sglang_rollout` keeps per process.

A user's function may run in the engine's event loop (a generate function), in the loop of
`slime.utils.async_utils.run`, or in a loop of its own. So everything that belongs to an event loop is kept per loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from slime.utils.http_utils import get, init_http_client, post, wrap_ipv6
from slime.utils.misc import SingletonMeta
from slime_core.errors import ConfigError, EngineError
from slime_core.sample import GenerationOutput, Group, Sample
from slime_core.workers.call import Slots

if TYPE_CHECKING:
    from slime_core.rollout.generate import SampleRunner
    from slime_core.rollout.hooks import SampleHook

_RUNNERS = 16
"""Largest number of runners per event loop; there is one per settings object and value of `score_groups`."""
_CONTROL_TIMEOUT = 60.0


def router_url(args: Any) -> str:
    """Return `http://host:port` of the engine. Raises ConfigError if the settings have no address."""
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if not host or not port:
        raise ConfigError(
            "no engine address: `slime train` sets args.sglang_router_ip and args.sglang_router_port when a generate or"
            " rollout function takes no `context`; elsewhere type --sglang-router-ip and --sglang-router-port"
        )
    return f"http://{wrap_ipv6(str(host))}:{port}"


class RouterEngine:
    """The generating methods of `slime_core.protocols.RolloutEngine`, over `slime.utils.http_utils`."""

    weight_transports: ClassVar[tuple[str, ...]] = ()

    def __init__(self, args: Any = None, url: str | None = None) -> None:
        """Use the engine at `url` (`http://host:port`), by default the address in the settings."""
        self._args = args
        self._url = url

    @property
    def url(self) -> str:
        """Address of the engine. Raises ConfigError if it is not set."""
        return self._url or router_url(self._args)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
    ) -> GenerationOutput:
        """Continue `input_ids`. Raises aiohttp.ClientError, TimeoutError, EngineError."""
        url = self.url + "/generate"
        body: dict[str, Any] = {"input_ids": list(input_ids), "sampling_params": dict(sampling_params)}
        body |= {"return_logprob": True, **({} if rid is None else {"rid": rid})}
        headers = None if session_id is None else {"X-SMG-Routing-Key": session_id}
        answer = await post(url, body, headers=headers)
        try:
            meta = dict(answer["meta_info"])
            entries = meta.pop("output_token_logprobs")
            meta.pop("input_token_logprobs", None)
            return GenerationOutput([int(e[1]) for e in entries], [float(e[0]) for e in entries], answer["text"], meta)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"{url}: not an answer of SGLang's API: {str(answer)[:200]}") from error

    async def abort(self, rid: str | None = None) -> None:
        """Abort one request, or all, on every worker."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        for worker in await self.workers():
            await post(f"{worker}/abort_request", body, max_retries=3, timeout=_CONTROL_TIMEOUT)

    async def workers(self) -> list[str]:
        """Return the addresses behind the router; if the address is an engine's own, return that address."""
        import aiohttp

        router = self.url
        try:
            answer = await get(f"{router}/workers", max_retries=3, timeout=_CONTROL_TIMEOUT)
        except aiohttp.ClientResponseError as error:
            if error.status not in (404, 405):
                raise
            return [router]
        return [str(worker["url"]).rstrip("/") for worker in answer["workers"]]


class GenerateState(metaclass=SingletonMeta):
    """`GenerateState(args)`: tokenizer, sampling settings and pending tasks; the same object for the whole process.

    Attributes: `args`, `tokenizer`, `processor` (None: text only), `sampling_params` (copy before changing),
    `semaphore`, `aborted`, `pendings` (tasks of `submit_generate_tasks`), `remaining_batch_size`, `rollout_id`.
    """

    def __init__(self, args: Any) -> None:
        from slime_core.data.tokenizer import load_tokenizer
        from slime_core.rollout.generate import train_sampling_params

        init_http_client(args)
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.processor = None
        self.sampling_params: dict[str, Any] = train_sampling_params(args)
        self.rollout_id: int | None = None
        """Rollout number, passed to sample hooks with this parameter; custom rollout functions may set it."""
        self._slots = Slots(getattr(args, "sglang_server_concurrency", None) or 512)
        self._runners: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, OrderedDict[tuple[int, bool], tuple[Any, SampleRunner]]
        ] = weakref.WeakKeyDictionary()
        self.reset()

    def reset(self) -> None:
        """Reset for the next rollout: nothing pending, not aborted."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Group]] = set()
        self.aborted = False

    @property
    def semaphore(self) -> Any:
        """Semaphore of the running event loop: `async with state.semaphore` limits concurrent generation."""
        return self._slots()

    @property
    def aborted(self) -> bool:
        """True if the rollout is ending: start nothing, and return unfinished samples as ABORTED."""
        return self._aborted or any(runner.stopping for runner in self._all_runners())

    @aborted.setter
    def aborted(self, value: bool) -> None:
        self._aborted = value
        for runner in self._all_runners():
            runner.stopping = value

    def _all_runners(self) -> list[SampleRunner]:
        """Return the runners of every event loop; a copy, since other loops may add runners concurrently."""
        return [runner for kept in list(self._runners.values()) for _, runner in list(kept.values())]

    def submit_generate_tasks(self, samples: list[Group]) -> None:
        """Start `generate_and_rm_group` for every group; the tasks are in `pendings`."""
        from slime.rollout.sglang_rollout import generate_and_rm_group

        for group in samples:
            run = generate_and_rm_group(self.args, group, sampling_params=self.sampling_params.copy(), evaluation=False)
            self.pendings.add(asyncio.create_task(run))
        self.remaining_batch_size += len(samples)

    # -- for this package ----------------------------------------------------------------------------

    def encode(self, sample: Sample) -> None:
        """Encode the prompt of a sample without token ids."""
        from slime_core.data.tokenizer import encode_prompt

        if not sample.tokens and sample.prompt:
            args = None if isinstance(sample.prompt, str) else self.args  # text has its template already
            sample.tokens = encode_prompt(self.tokenizer, sample.prompt, args, sample.metadata.get("tools"))

    def seeded(self, sample: Sample, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters with slime_core's seed for the sample, unless they have a seed."""
        from slime_core.rollout.generate import sampling_seed

        if sample.index is None or "sampling_seed" in params:
            return dict(params)
        return {**params, "sampling_seed": sampling_seed(self.args.rollout_seed, False, sample.index)}

    def runner(self, args: Any, *, score_groups: bool = True) -> SampleRunner:
        """Return the running loop's runner of samples; without `score_groups` the caller scores `--group-rm` groups."""
        kept = self._runners.setdefault(asyncio.get_running_loop(), OrderedDict())
        key = id(args), score_groups
        if key not in kept:
            made = _sample_runner(args, self.tokenizer, score_groups)
            made.stopping = self._aborted
            kept[key] = args, made
            while len(kept) > _RUNNERS:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key][1]


def _sample_runner(args: Any, tokenizer: Any, score_groups: bool) -> SampleRunner:
    from slime.rollout.rm_hub import scorer
    from slime_core.plugins.adapters import GenerateCaller
    from slime_core.plugins.resolve import resolve
    from slime_core.rollout.gate import GatedEngine
    from slime_core.rollout.generate import SampleRunner
    from slime_core.rollout.hooks import RolloutHooks
    from slime_core.rollout.reward import RewardStage

    class LeftToTheCaller(RewardStage):
        """Scores nothing: the caller scores the group when it is complete."""

        scores_groups = False  # a property in RewardStage

        async def score(self, samples: list[Sample], **keywords: Any) -> None:
            """Do nothing."""

    def generator(spec: str) -> GenerateCaller:
        return GenerateCaller(resolve("generators", spec, origin="--custom-generate-function-path"))

    flag = "--custom-rm-path" if getattr(args, "custom_rm_path", None) else "--rm-type"
    spec = getattr(args, "custom_rm_path", None) or getattr(args, "rm_type", None)
    default = scorer(args, spec, flag) if spec else None
    grouped = default is not None and default.scores_groups
    stage: Any = RewardStage if score_groups or not grouped else LeftToTheCaller
    rewards = stage(args, default, lambda named: scorer(args, named, "sample.custom_rm_path"))
    hooks = RolloutHooks(on_sample=sample_hooks(args))
    engine: Any = RouterEngine(args)
    return SampleRunner(
        args,
        GatedEngine(engine, deterministic=False),
        tokenizer,
        generator(getattr(args, "custom_generate_function_path", None) or "slime.rollout.sglang_rollout.generate"),
        rewards,
        generator,
        greedy_baseline=score_groups and _needs_baseline(args),
        hooks=hooks,
    )


def sample_hooks(args: Any) -> list[SampleHook]:
    """Return the hooks of `--rollout-sample-hook-path`. Raises slime_core.errors.PluginError."""
    from slime_core.plugins.resolve import resolve
    from slime_core.rollout.hooks import SampleHook

    return [
        SampleHook(resolve("slime_sample_generated", path, origin="--rollout-sample-hook-path").obj, path)
        for path in getattr(args, "rollout_sample_hook_path", None) or []
    ]


def _needs_baseline(args: Any) -> bool:
    from slime_core.plugins.resolve import resolve

    name = getattr(args, "advantage_estimator", None)
    if not name:
        return False
    return bool(
        getattr(resolve("estimators", name, origin="--advantage-estimator").obj, "needs_greedy_baseline", False)
    )
