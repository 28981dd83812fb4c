"""The program of the preflight's fresh interpreter: resolve every component again and call each once on a small sample.

`fresh_process.py` starts it with a boot line, sends one JSON line with the job, and reads one JSON line per event. A
component that crashes, hangs or prints here does not affect the run.

It is an error if a component raises on a row of the data or returns the wrong type. It is only a warning if there is no
row, so that the sample is made up, or if the component may work in a run: a service is not available, a stand-in lacks
an attribute, or a score is NaN. Functions that read rewards get the rewards of the run's own reward. If it could not be
called, the rewards are made up, and exceptions of such functions are not reported.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_rewards.processes.messages import unpack_args

from slime_core.errors import EngineError, PluginError, RolloutError, SlimeError
from slime_core.plugins.adapters import PluginNotFiniteError
from slime_core.plugins.registry import Resolved
from slime_core.plugins.resolve import resolve
from slime_core.protocols import Args
from slime_core.sample import Group, Sample, SampleStatus


class WrongAnswer(Exception):
    """Raised if a component returned an invalid value."""


_MADE_UP: Mapping[str, Any] = {"place": "", "spec": None, "prompt": "1+1=", "label": "2", "metadata": {}}
"""Row of a bench without data."""
_ROWS_S = 1.0
"""Seconds in which rows after the first are scored."""


class Bench:
    """Small samples to call components with, of the first row of `rows`."""

    def __init__(
        self, args: Args, rows: Sequence[Mapping[str, Any]] = (), called: Callable[[], None] = lambda: None
    ) -> None:
        """Create the bench. `called` is called before each call after the first, whose deadline begins then."""
        self.args, self.rows, self.called = args, rows, called
        self.row = rows[0] if rows else _MADE_UP
        self.scored: Group = []
        """Samples with the rewards of the run; empty while unknown."""

    @property
    def _label(self) -> Any:
        return self.row["label"]

    @property
    def _prompt(self) -> Any:
        return self.row["prompt"]

    @property
    def reward_spec(self) -> str | None:
        """The reward that scores this row in the run."""
        metadata = self.row["metadata"]
        own = metadata.get("custom_rm_path") or metadata.get("rm_type")
        return own or self.args.custom_rm_path or self.args.rm_type

    def prompt(self) -> Sample:
        """Return a sample before generation, one token per character."""
        from slime_testing_probes.scripted import CharTokenizer

        text = self._prompt if isinstance(self._prompt, str) else json.dumps(self._prompt)
        sample = Sample(prompt=copy.deepcopy(self._prompt), label=self._label, tokens=CharTokenizer().encode(text))
        sample.metadata = copy.deepcopy(self.row["metadata"])
        sample.group_index = sample.index = 0
        sample.session_id = "preflight"
        return sample

    def answered(self) -> Sample:
        """Return the sample with its label as the answer."""
        return self.answering(str(self._label) if self._label not in (None, "") else "42")

    def answering(self, text: str) -> Sample:
        """Return the sample with `text` as its response."""
        sample = self.prompt()
        tokens = [ord(c) for c in text]
        sample.append_response_tokens(None, tokens, [-0.5] * len(tokens), text=text)
        sample.status = SampleStatus.COMPLETED
        return sample

    def group(self) -> Group:
        """Return a group of answers to one prompt, as many as in a run but at most four.

        Rewards that are numbers alternate between 0 and 1. A mapping keeps the entries that the run's reward returned.
        """
        size, key = min(self.args.n_samples_per_prompt, 4), self.args.reward_key
        known = self.scored or [self.answered()]
        samples = [copy.deepcopy(known[i % len(known)]) for i in range(size)]
        for i, sample in enumerate(samples):
            sample.index = i
            if key:
                told = sample.reward if isinstance(sample.reward, Mapping) else {}
                sample.reward = {**told, key: float(i % 2)}
            elif not isinstance(sample.reward, Mapping):
                sample.reward = float(i % 2)
        return samples


def _reward(bench: Bench, resolved: Resolved) -> None:
    from slime_core.plugins.adapters import RewardCaller
    from slime_core.plugins.signatures import asks_by_name

    if inspect.isclass(resolved.obj) and asks_by_name(resolved.obj):
        return  # a model, which is built once, in the process that scores
    caller = RewardCaller(resolved, bench.args, inline=True, group=bool(bench.args.group_rm))
    # A term of a sum uses the rows of the sum, which its origin names.
    own = [r for r in bench.rows if r["spec"] == resolved.spec or resolved.origin.endswith(f" {r['spec']!r}")]
    bench.row = own[0] if own else bench.row

    def score(*samples: Sample) -> list[Any]:
        return asyncio.run(caller.score(samples))

    size = min(bench.args.n_samples_per_prompt, 4) if caller.scores_groups else 1
    samples = [bench.answered() for _ in range(size)]
    for i, sample in enumerate(samples):
        sample.index = i
    with contextlib.suppress(EngineError):  # it asks a model of an engine that does not run yet
        for sample, reward in zip(samples, score(*samples)):
            sample.reward = dict(reward) if isinstance(reward, Mapping) else reward
        if resolved.spec == bench.reward_spec:
            bench.scored = samples
        if caller.scores_groups:
            return
        until = time.monotonic() + _ROWS_S
        for bench.row in own[1:]:
            if time.monotonic() > until:
                break
            bench.called()
            score(bench.answered())
        if own and all(row["label"] is None for row in own):
            bench.called()
            _check_unlabelled(bench, score)


_ANSWERS = ("", "42", r"\boxed{42}", "Answer: 42", "The answer is (B).", "```python\nprint(42)\n```")
"""Answers in the formats that rewards read."""


def _check_unlabelled(bench: Bench, score: Callable[..., list[Any]]) -> None:
    """Raise WrongAnswer for a reward that pays every answer alike, but with a label would not."""

    def paid(label: Any) -> list[Any]:
        samples = [bench.answering(text) for text in _ANSWERS]
        for sample in samples:
            sample.label = label
        return score(*samples)

    without = paid(None)
    if any(reward != without[0] for reward in without):
        return
    for label in ("42", "B"):
        try:
            depends = paid(label) != without
        except ValueError:  # it reads labels, and not these
            depends = True
        if depends:
            raise WrongAnswer(
                f"pays {without[0]} for every answer, since it compares with the label, and none of the"
                f" {len(bench.rows)} rows read has one; name the column: --label-key NAME"
            )


def _generator(bench: Bench, resolved: Resolved) -> None:
    from slime_core.plugins.adapters import GenerateCaller
    from slime_core.protocols import GenerateContext
    from slime_testing_probes.scripted import CharTokenizer, ScriptedEngine

    caller = GenerateCaller(resolved)
    if not caller.takes_context:
        return  # it posts to an engine that does not run yet
    engine = ScriptedEngine(lambda _: "42")
    context = GenerateContext(engine, CharTokenizer(), False, 0)
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 16, "sampling_seed": 0}
    result = asyncio.run(caller.call(bench.args, bench.prompt(), params, context=context))
    for sample in result if isinstance(result, list) else [result]:
        try:
            sample.validate()
        except ValueError as error:
            raise WrongAnswer(f"returned a sample out of order: {error}") from error
        if sample.status == SampleStatus.PENDING:
            raise WrongAnswer("returned a sample whose status is still PENDING")
    samples = result if isinstance(result, list) else [result]
    if all(sample.reward is not None for sample in samples):  # then no reward function is called
        bench.scored = samples


def _filter(bench: Bench, resolved: Resolved) -> None:
    answer = resolved.obj(bench.args, bench.group())
    if not hasattr(answer, "keep"):
        answer = answer.item() if hasattr(answer, "item") else answer
        _expect(isinstance(answer, bool), answer, "a bool or a decision with .keep and .reason")


def _buffer(bench: Bench, resolved: Resolved) -> None:
    """Add, observe and take two groups through the wrapper that the run has around every form of buffer."""
    from slime_core.data.buffer import SampleBuffer, resolve_buffer

    buffer = SampleBuffer(bench.args, bench.args.n_samples_per_prompt, resolve_buffer(bench.args))
    waiting = [bench.group(), bench.group()]
    for i, group in enumerate(waiting):
        for sample in group:
            sample.group_index = i
    try:
        buffer.take(1)
        buffer.observe(waiting, True)
        buffer.take(1)
        buffer.add(waiting)
        buffer.take(1)
    except RolloutError as error:
        raise WrongAnswer(str(error)) from error
    except PluginError as error:
        if isinstance(error.__cause__, Exception) and _may_work(error.__cause__):
            raise error.__cause__ from None
        raise


def _post_process(bench: Bench, resolved: Resolved) -> None:
    group = bench.group()
    answer = resolved.obj(bench.args, group)
    right = isinstance(answer, tuple) and len(answer) == 2 and all(len(part) == len(group) for part in answer)
    _expect(right, answer, f"(raw_rewards, rewards), {len(group)} numbers each")


def _converter(bench: Bench, resolved: Resolved) -> None:
    answer = resolved.obj(bench.args, bench.group())
    _expect(isinstance(answer, dict), answer, "a dictionary")


def _sample_hook(bench: Bench, resolved: Resolved) -> None:
    known = {"rollout_id": 0, "evaluation": False}
    names = inspect.signature(resolved.obj).parameters
    answer = resolved.obj(bench.args, bench.answered(), **{k: v for k, v in known.items() if k in names})
    if inspect.isawaitable(answer):

        async def finish() -> Any:
            return await answer

        answer = asyncio.run(finish())
    _expect(answer is None or isinstance(answer, Sample), answer, "None or a Sample")


def _sample_filter(bench: Bench, resolved: Resolved) -> None:
    resolved.obj(bench.args, [bench.group()])


def _estimator(bench: Bench, resolved: Resolved) -> None:
    import torch

    from slime_core.estimator import estimator_class
    from slime_core.protocols import AdvantageInputs, LossInputs, RewardInputs
    from slime_core.sample.provenance import TurnSpan

    args, lengths, parts = bench.args, [3, 2], _parts(bench)
    made = estimator_class(resolved.obj, resolved.ref.label)
    if made.needs_components and parts is None:
        return
    estimator = made(args)
    turns = [[TurnSpan(0, 1, 0.5, state="a"), TurnSpan(2, 3, 0.5, state="b")], [TurnSpan(0, 2, 0.0, state="a")]]
    rollout = RewardInputs(
        [1.0, 0.0], [0, 0], [0, 1], lengths, [False] * 2, [0.5, 0.5],
        components=[dict(parts or {}), dict(parts or {})], turns=turns, metadata=[{}, {}],
    )  # fmt: skip
    shaped = estimator.shape_rewards(args, rollout)
    _expect(len(shaped) == 2, shaped, "one shaped reward per sample")
    of_turns = estimator.shape_turns(args, rollout)
    _expect([len(row) for row in of_turns] == [2, 1], of_turns, "one shaped reward per turn")

    def column(value: float) -> list[torch.Tensor]:
        return [torch.full((n,), value) for n in lengths]

    inputs = AdvantageInputs(
        rewards=torch.tensor(shaped, dtype=torch.float32), response_lengths=lengths, group_indices=[0, 0],
        rollout_ids=[0, 1], loss_masks=column(1.0), kl=column(0.0), log_probs=column(-0.5),
        rollout_log_probs=column(-0.5), ref_log_probs=column(-0.5), teacher_log_probs=column(-0.5), values=column(0.1),
        components=[dict(parts or {}), dict(parts or {})], turns=turns, turn_rewards=of_turns,
        rollout_data={
            "tokens": [[1, 2, 3, 4], [1, 2, 3]], "raw_reward": [1.0, 0.0], "truncated": [0, 0], "metadata": [{}, {}],
            "sample_indices": [0, 1], "total_lengths": [4, 3],
        },
    )  # fmt: skip
    answer = estimator.advantages(args, inputs)
    shapes = [tuple(part.shape) for part in answer.advantages]
    _expect(shapes == [(n,) for n in lengths], shapes, "one [response_length] tensor of advantages per sample")
    old = torch.full((sum(lengths),), -0.5)
    outputs = estimator.policy_loss(
        args,
        LossInputs(
            log_probs=old.clone().requires_grad_(), old_log_probs=old, advantages=torch.cat(answer.advantages),
            loss_mask=torch.ones(sum(lengths)), sample_lengths=lengths, returns=torch.cat(answer.returns),
        ),
    )  # fmt: skip
    _expect(outputs.loss.shape == old.shape, tuple(outputs.loss.shape), "one loss per token")


def _parts(bench: Bench) -> dict[str, float] | None:
    """Return the parts that the run's reward has for a finished answer; None if no answer was scored."""
    for sample in map(copy.deepcopy, bench.scored):
        if sample.status == SampleStatus.COMPLETED:
            sample.note_components(bench.args.reward_key)
            return sample.reward_components or {}
    return None


def _expect(right: bool, answer: Any, expected: str) -> None:
    if not right:
        raise WrongAnswer(f"returned {repr(answer)[:80]}; expected {expected}")


PROBES: Mapping[str, Callable[[Bench, Resolved], None]] = {
    "rewards": _reward,
    "generators": _generator,
    "filters": _filter,
    "buffers": _buffer,
    "reward_post_processes": _post_process,
    "sample_converters": _converter,
    "slime_sample_generated": _sample_hook,
    "slime_filter_samples": _sample_filter,
    "estimators": _estimator,
    "advantages": _estimator,
}
"""Kinds whose components are called. Components of other kinds are only loaded: a call would start a model, write to a
logger, or need objects that exist only in a run."""
ON_ROWS = PROBES.keys() - {"estimators", "advantages"}
"""Kinds that are called with a row of the data; estimators get made-up numbers, and the parts of a scored reward."""
_READ_REWARDS = (
    "filters", "buffers", "reward_post_processes", "sample_converters", "slime_filter_samples",
)  # fmt: skip
"""Kinds that get scored samples."""
_GIVE_REWARDS = ("rewards", "generators")
"""Kinds that are called first."""


def _may_work(error: Exception) -> bool:
    """Return whether a run may succeed: a service did not answer, or a stand-in lacks an attribute."""
    from slime_testing_probes.scripted import CharTokenizer, ScriptedEngine

    if isinstance(error, AttributeError):
        return isinstance(error.obj, CharTokenizer | ScriptedEngine)
    of_files = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError
    return isinstance(error, OSError) and not isinstance(error, of_files)


def main(descriptor: int) -> None:
    """Read the order from standard input, write events to the file `descriptor`."""
    order = json.loads(sys.stdin.readline())
    args = unpack_args(base64.b64decode(order["args"]))
    loaded: list[tuple[int, str, Resolved]] = []
    with os.fdopen(descriptor, "w", encoding="utf-8", buffering=1) as out:

        def tell(**event: Any) -> None:
            out.write(json.dumps(event) + "\n")

        for number, item in enumerate(order["components"]):
            tell(event="load", number=number)
            try:
                loaded.append((number, item["kind"], resolve(item["kind"], item["spec"], origin=item["origin"])))
            except SlimeError as error:
                tell(event="broken", number=number, message=str(error))
        scored: Group = []
        for number, kind, resolved in sorted(loaded, key=lambda item: item[1] not in _GIVE_REWARDS):
            probe = PROBES.get(kind)
            if probe is None or number in order["skip"]:
                continue
            bench = Bench(args, order["rows"], functools.partial(tell, event="call", number=number))
            bench.scored = scored
            bench.called()
            try:
                probe(bench, resolved)
                scored = bench.scored
            except PluginNotFiniteError as error:
                tell(event="raised", number=number, message=str(error))
            except WrongAnswer as error:
                tell(event="wrong", number=number, message=str(error))
            except Exception as error:
                if kind in _READ_REWARDS and not scored:
                    continue
                if isinstance(error, SlimeError):
                    tell(event="wrong", number=number, message=str(error))
                    continue
                event = "failed" if order["rows"] and not _may_work(error) else "raised"
                place = f"{bench.row['place']}: " if bench.row["place"] else ""
                tell(event=event, number=number, message=f"{place}{type(error).__name__}: {error}")
        tell(event="done")
        out.flush()
        os._exit(0)  # without exit handlers and threads of user code, which may hang
