"""A prompt group -> the same group with responses and rewards.

`rollout.pool` and `rollout.evaluate` call `SampleRunner.run_group`. A failed sample is returned with status FAILED
and the reason; only `--max-consecutive-failures` failures in a row stop the run. A generate function may return several
samples (fan-out); the group then grows and the siblings share a `rollout_id`. If a sibling was interrupted, the
original sample is returned ABORTED in place of the siblings: a fan-out is kept complete or executed again.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Protocol

from slime_core.data.tokenizer import Tokenizer, encode_prompt, encode_rendered
from slime_core.data.tools import prompt_tools
from slime_core.distributions import provided
from slime_core.errors import RolloutError
from slime_core.multimodal import image_token_of
from slime_core.protocols import Args, GenerateContext
from slime_core.rollout.deadlines import GroupClock, ended
from slime_core.rollout.fate import FINISHED, GROUP_TIMEOUT, remove_if_masked
from slime_core.rollout.gate import GatedEngine, Hold, Place
from slime_core.rollout.hooks import RolloutHooks, failed_call
from slime_core.rollout.reward import RewardStage, reward_problem
from slime_core.sample import Group, Sample, SampleStatus, admission
from slime_core.sample.admission import Drawn
from slime_core.sample.types import executions
from slime_core.waits import waiting

if TYPE_CHECKING:
    from slime_core.plugins.adapters import GenerateCaller

logger = logging.getLogger(__name__)

_DIGITS = re.compile(r"\d+")


def sampling_seed(seed: int, *parts: object) -> int:
    """Return a 31-bit seed that depends only on the arguments, so a resumed run samples the same tokens."""
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def train_sampling_params(args: Args) -> dict[str, object]:
    """Return the rollout's sampling settings under SGLang's names."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


class Timeline(Protocol):
    """A recorder of times (entry point `timeline` of `slime.metrics`)."""

    def now(self) -> float:
        """Return the seconds since 1970."""

    def sample(
        self, siblings: list[Sample], times: tuple[float, ...], before: int, outside: float, context: GenerateContext
    ) -> None:
        """Record the samples that a call of a generate function returned."""

    def scored(self, group: Group, start: float) -> None:
        """Record that a group was scored as a whole, beginning at `start`."""

    def flush(self) -> None:
        """Write the buffered records."""


class Extra(Protocol):
    """An extra response of each group, which is not trained on (`slime_data.greedy_baseline`)."""

    def extra_sample(self, group: Group) -> Sample | None:
        """Return the sample to generate; None if the group has its extra response."""

    def extra_params(self, params: Mapping[str, object]) -> dict[str, object]:
        """Return its sampling settings."""

    def attach(self, samples: Iterable[Sample], siblings: Sequence[Sample]) -> None:
        """Store its outcome in the group's samples."""

    def lack(self, group: Sequence[Sample]) -> str | None:
        """Return why a finished group has no usable extra response: "aborted", or a reason to drop it; else None."""


class _Run:
    """A sample on its way to its reward, in a task of its own that a deadline may cut off."""

    def __init__(
        self,
        sample: Sample,
        place: Place,
        left: set[_Run],
        over: asyncio.Future[None],
        done: Callable[[list[Sample]], None],
    ) -> None:
        """`left` has the group's runs without an end; `over` is done after the last end, or the first error."""
        self.sample, self.place, self._left, self._over, self._done = sample, place, left, over, done
        self.task: asyncio.Task[list[Sample]]
        """Task, set by the caller."""
        self.siblings: list[Sample]
        """Resulting samples, once the run has ended."""
        self.failure: tuple[str, str] | None = None
        """Place and reason of the failure, once a deadline has passed."""
        left.add(self)

    def cut(self, where: str, reason: str) -> None:
        """Cancel the task at a deadline, if it has not ended: the sample fails, whatever its code does then."""
        if self.failure is None and not self.task.done():
            self.failure = where, reason
            self._giving_up = asyncio.create_task(self._give_up())

    @contextmanager
    def limited(self, label: str, limit: float | None) -> Iterator[None]:
        """Cut the run off after `limit` seconds in the block, even if the block catches that."""
        timer = limit and asyncio.get_running_loop().call_later(
            limit, self.cut, label, f"not done within --rollout-timeout {limit} s"
        )
        try:
            with waiting(label, deadline=limit, then="the sample fails"):
                yield
        finally:
            if timer:
                timer.cancel()
            if self.failure:
                raise asyncio.CancelledError

    async def _give_up(self) -> None:
        if not await ended({self.task}):
            self.sample = copy.deepcopy(self.sample)
            self._end([self.sample])

    def end(self, task: asyncio.Task[list[Sample]]) -> None:
        """Take the task's result or error; after a deadline the sample has failed."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if self.failure or error is None:
            self._end([self.sample] if self.failure else task.result())
        elif not self._over.done():
            self._over.set_exception(error)
        self.place.leave()  # where it was cancelled before it began

    def _end(self, siblings: list[Sample]) -> None:
        if self in self._left:
            if self.failure:
                self.sample.fail(*self.failure)
            self.place.leave()
            self.siblings = siblings
            self._done(siblings)
            self._left.remove(self)
            if not self._left and not self._over.done():
                self._over.set_result(None)


class SampleRunner:
    """A runner of the generate function, then the reward, for the samples of a group; limits concurrency."""

    def __init__(
        self,
        args: Args,
        engine: GatedEngine,
        tokenizer: Tokenizer,
        generator: GenerateCaller,
        rewards: RewardStage,
        resolve_generator: Callable[[str], GenerateCaller],
        *,
        greedy_baseline: bool = False,
        hooks: RolloutHooks | None = None,
    ) -> None:
        self.args = args
        self.engine = engine
        self.tokenizer = tokenizer
        self.generator = generator
        self.rewards = rewards
        self.hooks = hooks or RolloutHooks()
        self.stopping = False
        """True while a rollout winds down: samples that have not started are left unchanged."""
        self.greedy_baseline = greedy_baseline
        """Whether training groups get an extra greedy response, whose reward is stored in the samples' metadata."""
        self._extra: Extra | None = provided("slime.data", "greedy_baseline") if greedy_baseline else None
        self.last_end = float("-inf")
        """Time when the last sample ended, successful or not, by the event loop's clock."""
        self.timeline: Timeline | None = None
        """Recorder of the times when samples begin and end."""
        self._resolve_generator = cache(resolve_generator)
        self._image_token = image_token_of(args.hf_checkpoint)
        self._failures_in_a_row = 0
        self._failures: Counter[tuple[str, str]] = Counter()
        self._text_makers: set[str] = set()
        """Generate functions that return text and for which a warning has been logged."""

    async def run_group(
        self,
        group: Group,
        params: dict[str, object],
        *,
        rollout_id: int | None,
        evaluation: bool = False,
        clock: GroupClock | None = None,
        sample_done: Callable[[list[Sample]], None] = lambda _: None,
        args: Args | None = None,
        hold: Hold | None = None,
    ) -> Group:
        """Generate and score every sample; the result is ordered as `group`, fan-out siblings in place.

        Args:
            group: Samples of a prompt.
            params: Sampling parameters, under SGLang's names.
            rollout_id: Number of the rollout, if any.
            evaluation: Whether the samples belong to an evaluation.
            clock: Deadline of the group, started when the first sample gets its place (`rollout.deadlines`).
            sample_done: Called with the resulting samples each time a sample has ended.
            args: Settings for generate functions, in place of the run's; rewards take their plugin options from them.
            hold: The group's hold on the engine, which the caller closes; by default one that ends with this call.
        """
        args = self.args if args is None else args
        context = GenerateContext(self.engine, self.tokenizer, evaluation, rollout_id)  # type: ignore[arg-type]
        extra = self._extra.extra_sample(group) if self._extra and not evaluation else None
        asked = self.timeline.now() if self.timeline else 0.0
        samples = [(s, params) for s in group]
        if self._extra and extra is not None:
            samples.append((extra, self._extra.extra_params(params)))
        with nullcontext(hold) if hold is not None else self.engine.hold() as hold:
            left, over = set[_Run](), asyncio.get_running_loop().create_future()
            runs = [_Run(sample, hold.place(), left, over, sample_done) for sample, _ in samples]
            for run, (_, own) in zip(runs, samples):
                run.task = asyncio.create_task(self._run_sample(run, own, context, clock, args, asked))
                run.task.add_done_callback(run.end)
            hold.lend()
            if clock is not None and clock.cuts:

                def expire(_: object) -> None:
                    for run in runs:
                        run.cut(GROUP_TIMEOUT, "cut off at the deadline of its group (shrink)")

                clock.expired.add_done_callback(expire)
            try:
                await over
            except asyncio.CancelledError:
                tasks = {run.task for run in runs}
                await ended(tasks)
                await asyncio.wait(tasks)  # one that ignores its cancellation may still write to its sample
                raise
            finally:
                hold.take_back()
            results = [run.siblings for run in runs]
            finished = [sample for siblings in results for sample in siblings]
            if self.rewards.scores_groups:
                started = self.timeline.now() if self.timeline else 0.0
                await self.rewards.score(finished, evaluation=evaluation, rollout_id=rollout_id, args=args)
                if self.timeline:
                    self.timeline.scored(finished, started)
            for siblings in results:
                self._count(siblings)
            if self._extra and extra is not None:
                finished = [sample for siblings in results[:-1] for sample in siblings]
                self._extra.attach([*group, *finished], results[-1])
            return finished

    async def _run_sample(
        self,
        run: _Run,
        params: dict[str, object],
        context: GenerateContext,
        clock: GroupClock | None,
        args: Args,
        asked: float,
    ) -> list[Sample]:
        sample = run.sample
        try:
            await run.place.begin()
            if clock is not None:
                clock.start()
            if (self.stopping and not context.evaluation) or sample.status in FINISHED:
                return [sample]
            timeline, before, outside = self.timeline, sample.response_length, sample.non_generation_time
            started = generated = timeline.now() if timeline else 0.0
            try:
                siblings = await self._generate(run, params, context, args)
                generated = timeline.now() if timeline else 0.0
                if not self.rewards.scores_groups:
                    await self.rewards.score(
                        siblings, evaluation=context.evaluation, rollout_id=context.rollout_id, args=args
                    )
            finally:
                self.last_end = asyncio.get_running_loop().time()
            if timeline:
                timeline.sample(siblings, (asked, started, generated, timeline.now()), before, outside, context)
            return siblings
        finally:
            run.place.leave()

    def baseline_lack(self, group: Group) -> str | None:
        """Return why a finished group lacks the greedy baseline that it needs (see `Extra.lack`), or None."""
        return self._extra.lack(group) if self._extra else None

    def count_failures(self, group: Group) -> None:
        """Count samples that the caller marked as failed. Raises RolloutError when too many fail in a row."""
        for siblings in executions(group):
            self._count(siblings)

    async def _generate(
        self, run: _Run, params: dict[str, object], context: GenerateContext, args: Args
    ) -> list[Sample]:
        sample = run.sample
        if sample.response_length and self.args.mask_offpolicy_in_partial_rollout:
            sample.withhold(0, sample.response_length, "mask_offpolicy_in_partial_rollout")
        seed = self.args.rollout_seed
        params = {"sampling_seed": sampling_seed(seed, context.evaluation, sample.index), **params}
        sample.session_id = sample.session_id or f"{int(context.evaluation)}-{sample.group_index}-{sample.index}"
        try:
            generator = self._generator_of(sample)
            _check_images(sample, generator)
            self._encode(sample)
        except Exception as error:
            sample.fail("prompt or generate function", error)
            return [sample]
        given, prompt_length = sample.tokens, len(sample.tokens) - sample.response_length
        given_id, drawn = sample.rollout_id, Drawn.of(sample)
        try:
            with run.limited(generator.label, self.args.rollout_timeout):
                result = await generator.call(args, sample, params, evaluation=context.evaluation, context=context)
        except BaseException as error:
            if not _begins_with(sample, given, prompt_length):  # cut off while it changed the sample
                sample.tokens, sample.response_length = given[:prompt_length], 0
                sample.reset_for_retry()
            if run.failure:
                sample.fail(*run.failure)
                return [sample]
            if isinstance(error, RolloutError) or not isinstance(error, Exception):
                raise
            return [failed_call(sample, generator.label, error, self.args)]
        siblings = result if isinstance(result, list) else [result]
        siblings = self._checked(siblings, sample, generator.label, drawn)
        if self.hooks.on_sample:
            call = self.args, siblings, context.rollout_id, context.evaluation
            found = await self.hooks.after_generation(*call)
            siblings = self._checked(found, sample, self.hooks.sample_labels, drawn)
        if self.args.mask_offpolicy_in_partial_rollout:  # a resumed sample may have ended at once
            for sibling in siblings if drawn.num_tokens > len(drawn.prompt) else ():
                remove_if_masked(sibling)
        if len(siblings) > 1 and any(s.status == SampleStatus.ABORTED for s in siblings):
            return [_interrupted(sample, given[:prompt_length], given_id)]
        return siblings

    def _encode(self, sample: Sample) -> None:
        """Set the sample's prompt ids; data sources written for THUDM/slime leave them to the rollout."""
        if not sample.tokens and sample.prompt:
            args = None if isinstance(sample.prompt, str) else self.args  # text has its template already
            sample.tokens = encode_prompt(self.tokenizer, sample.prompt, args, prompt_tools(self.args, sample.metadata))

    def _checked(self, siblings: list[Sample], origin: Sample, where: str, drawn: Drawn) -> list[Sample]:
        """Set a common rollout id for fan-out siblings; mark samples that cannot be trained on as failed."""
        shared = next((s.rollout_id for s in siblings if s.rollout_id is not None), origin.index)
        for sibling in siblings:
            sibling.group_index = origin.group_index if sibling.group_index is None else sibling.group_index
            sibling.row = origin.row if sibling.row is None else sibling.row
            if len(siblings) > 1:
                sibling.rollout_id = shared
            if admission.is_text(sibling):
                problem = self._take_text(sibling, drawn, where)
            else:
                problem = drawn.problem(sibling, same=sibling is origin)
            problem = problem or admission.problem(sibling, self._image_token)
            if sibling.status == SampleStatus.PENDING:
                problem = problem or "returned a sample whose status is still PENDING"
            if sibling.status == SampleStatus.ABORTED and sibling.remove_sample:  # the engine's own abort removes none
                problem = problem or "gave up: it returned the sample ABORTED, with remove_sample"
            problem = problem or reward_problem(sibling.reward)
            if problem:
                sibling.fail(where, problem)
        return siblings

    def _take_text(self, sample: Sample, drawn: Drawn, where: str) -> str | None:
        """Tokenise a text-only response after the prompt that the function left; return the problem, or None."""
        if where not in self._text_makers:
            self._text_makers.add(where)
            logger.warning(
                "%s returns text without token ids. It is tokenised again, which may give other tokens than were"
                " sampled, and the trainer's own log-probs count as the old ones; sample.append_response_tokens(tokens="
                "..., log_probs=...) keeps what was sampled", where,
            )  # fmt: skip
        try:
            if not drawn.has_prompt_of(sample):
                sample.tokens, sample.spans = [], None
                self._encode(sample)
            return admission.take_text(sample, encode_rendered(self.tokenizer, sample.response))
        except Exception as error:  # fields of user code may hold anything
            return f"{type(error).__name__}: {error}"

    def _generator_of(self, sample: Sample) -> GenerateCaller:
        spec = sample.generate_function_path or sample.metadata.get("generate_function_path")
        return self._resolve_generator(spec) if spec else self.generator

    def _count(self, siblings: list[Sample]) -> None:
        """Count an execution; it has failed if all of its samples have failed."""
        failed = [s for s in siblings if s.status == SampleStatus.FAILED]
        last = ""
        for sample in failed:
            last = self._tell_failure(sample)
        if len(failed) < len(siblings):
            finished = any(s.status in FINISHED for s in siblings)
            self._failures_in_a_row = 0 if finished else self._failures_in_a_row
            return
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self.args.max_consecutive_failures:
            raise RolloutError(
                f"{self._failures_in_a_row} samples in a row failed (--max-consecutive-failures"
                f" {self.args.max_consecutive_failures}); the last one in {last}"
            )

    def _tell_failure(self, sample: Sample) -> str:
        """Return where and why the sample failed; log the 1st, 10th, 100th and 1000th failure with the same reason."""
        failure = sample.metadata.get("failure", {})
        where, reason = str(failure.get("where")), str(failure.get("error"))
        kind = where, _DIGITS.sub("#", reason)  # so that reasons that differ only in numbers count as the same
        self._failures[kind] += 1
        if self._failures[kind] in (1, 10, 100, 1000):
            place = f" (at {failure['at']})" if "at" in failure else ""
            times = "" if self._failures[kind] == 1 else f" ({self._failures[kind]} samples so far)"
            logger.warning("sample %s failed in %s: %s%s%s", sample.index, where, reason, place, times)
        return f"{where}: {reason}"


def _check_images(sample: Sample, generator: GenerateCaller) -> None:
    """Raise RolloutError for a sample whose images would not reach the model."""
    if not sample.multimodal_inputs:
        return
    if not generator.traits.takes_images:
        raise RolloutError(f"the sample has images, which {generator.label} does not give to the engine")
    if not sample.tokens:
        raise RolloutError("the sample has images but no tokens; a data source makes them with the model's processor")


def _interrupted(origin: Sample, prompt: list[int], rollout_id: int | None) -> Sample:
    """Return the original sample of an interrupted fan-out, reset so that it is executed again."""
    origin.tokens, origin.response_length, origin.rollout_id = prompt, 0, rollout_id
    origin.reset_for_retry()
    origin.status = SampleStatus.ABORTED
    return origin


def _begins_with(sample: Sample, given: list[int], prompt_length: int) -> bool:
    """Return whether the sample's fields are consistent and its prompt is still the first part of `given`."""
    try:
        sample.validate()
    except ValueError:
        return False
    return len(sample.tokens) - sample.response_length == prompt_length and (
        sample.tokens is given or sample.prompt_tokens == given[:prompt_length]
    )
