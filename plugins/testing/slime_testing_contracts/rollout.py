"""The contract of rollout functions, run by the real rollout stage with a scripted engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
from slime_testing_probes.scripted import CharTokenizer, Reply, Request, ScriptedEngine

from slime_core.config import EvalDataset
from slime_core.errors import EngineError, SlimeError
from slime_core.plugins.adapters import GenerateCaller, RewardCaller
from slime_core.plugins.resolve import resolve
from slime_core.plugins.signatures import declared
from slime_core.protocols import Args, RolloutTraits, traits_of
from slime_core.rollout.batch import make_batch
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.reward import RewardStage
from slime_core.rollout.stage import RolloutParts, RolloutStage
from slime_core.sample import Group, Sample, SampleStatus
from slime_testing_contracts.base import Contract
from slime_testing_contracts.tiny import tiny_model, write_rows

KIT = "slime_testing_contracts.tiny"


class Prompts:
    """A data source in memory: sums as text, one token per character; remembers groups handed out and given back."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.tokenizer = CharTokenizer()
        self.drawn: list[Group] = []
        self.returned: list[Group] = []
        self._waiting: list[Group] = []

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return groups given back first, then new sums."""
        groups, self._waiting = self._waiting[:num_samples], self._waiting[num_samples:]
        while len(groups) < num_samples:
            groups.append(self._group(len(self.drawn)))
            self.drawn.append(groups[-1])
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Take back groups that a rollout did not use."""
        self.returned += samples
        self._waiting += samples

    def _group(self, number: int) -> Group:
        text = f"{number}+1="
        prompt = Sample(prompt=text, label=str(number + 1), tokens=self.tokenizer.encode(text), group_index=number)
        group = [copy.deepcopy(prompt) for _ in range(self.group_size)]
        for position, sample in enumerate(group):
            sample.index = number * self.group_size + position
            sample.session_id = f"session {sample.index}"
        return group


class RolloutContract(Contract):
    """Contract of rollout functions: `--rollout-batch-size` trainable groups, no lost group, evaluation by data set."""

    kind = "rollouts"
    default_args: ClassVar[Mapping[str, Any]] = {
        "rollout_batch_size": 3, "n_samples_per_prompt": 2, "rollout_max_response_len": 12, "rollout_timeout": 20.0,
        "label_key": "label", "over_sampling_batch_size": 3,
    }  # fmt: skip

    only_evaluates: ClassVar[bool] = False
    """True if the function is for `--eval-function-path` only."""

    def script(self, request: Request) -> Reply | str | BaseException:
        """Return the engine's reply to a request; override it for a function that needs special replies."""
        return str(len(request.input_ids) % 10) * 3

    @property
    def settings(self) -> Args:
        """Settings with a small evaluation data set."""
        assert self.folder is not None
        path = write_rows(self.folder / "eval.jsonl", 3)
        held = EvalDataset(name="held", path=str(path), label_key="label", n_samples_per_eval_prompt=2, temperature=0.0)
        own = {"eval_datasets": [held.model_copy(update={"max_response_len": 12})], "hf_checkpoint": str(tiny_model())}
        return super().settings.model_copy(update={**own, **self.args})

    def stage(
        self, script: Callable[[Request], Any] | None = None, **changes: Any
    ) -> tuple[RolloutStage, ScriptedEngine, Prompts]:
        """Start and return a rollout stage with the component; the reward is the share of digits."""
        args = self.settings.model_copy(update=changes)
        function, engine = self.resolved.obj, ScriptedEngine(script or self.script)
        source = Prompts(int(args.n_samples_per_prompt))
        takes_context = bool(declared(function, ("context",)))
        if not takes_context and traits_of(function, RolloutTraits).needs_engine:
            pytest.skip(
                "a function without the keyword `context` posts to args.sglang_router_ip; test it with run_loop"
            )
        needs_engine = traits_of(function, RolloutTraits).needs_engine

        def reward(spec: str) -> RewardCaller:
            return RewardCaller(resolve("rewards", spec), args)

        def generator(spec: str) -> GenerateCaller:
            return GenerateCaller(resolve("generators", spec))

        parts = RolloutParts(
            data_source=source, rollout_function=function, eval_function=function, tokenizer=engine.tokenizer,
            engine=engine if needs_engine else None, generator=generator(f"{KIT}:answer"),
            rewards=RewardStage(args, reward(f"{KIT}:digits"), reward), filters=FilterStage(args, None),
            resolve_generator=generator,
        )  # fmt: skip
        stage = RolloutStage(args, parts)
        stage.start()
        return stage, engine, source

    def _trains(self) -> None:
        if self.only_evaluates:
            pytest.skip("it is for --eval-function-path alone")

    def roll_out(self, **changes: Any) -> tuple[list[Group], dict[str, float], Prompts]:
        """Run one rollout. Return groups, metrics, and the data source afterwards."""
        self._trains()
        stage, _, source = self.stage(**changes)
        try:
            groups, metrics = stage.generate_groups(0)
        finally:
            stage.stop()
        return groups, metrics, source

    def test_every_group_can_be_trained_on(self) -> None:
        """Check for `--rollout-batch-size` groups that form a batch, each sample finished, scored and in order.

        For training a rollout function returns `RolloutFnTrainOutput(samples, metrics)`, or the list of groups.
        """
        groups, metrics, _ = self.roll_out()
        wanted = self.settings.rollout_batch_size
        assert len(groups) == wanted, f"--rollout-batch-size is {wanted}; the function returned {len(groups)} groups"
        for sample in (sample for group in groups for sample in group):
            try:
                sample.validate()
            except ValueError as error:
                pytest.fail(f"sample {sample.index} cannot be trained on: {error}", pytrace=False)
            assert sample.status != SampleStatus.PENDING, f"sample {sample.index} is still PENDING"
            failed = sample.status in (SampleStatus.FAILED, SampleStatus.ABORTED) or sample.remove_sample
            assert failed or sample.reward is not None, (
                f"sample {sample.index} is {sample.status.value} and has no reward; score it, or set remove_sample"
            )
        batch = make_batch(self.settings, 0, groups, None)
        assert any(any(mask) for mask in batch.loss_masks), "no token of the rollout is trained on"
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, (int, float))}
        assert not numbers, f"metrics are numbers; found {numbers!r}"

    def test_samples_come_once(self) -> None:
        """Check that no sample is returned twice."""
        groups, _, _ = self.roll_out()
        seen = [id(sample) for group in groups for sample in group]
        assert len(set(seen)) == len(seen), "a sample object is in the rollout twice"

    def test_it_waits_for_slow_answers(self) -> None:
        """Check responses that arrive in another order than their requests."""
        self._trains()

        def script(request: Request) -> Reply:
            return Reply("123", delay=0.003 * (sum(request.input_ids) % 4))

        stage, _, _ = self.stage(script)
        try:
            for rollout_id in range(2):
                groups, _ = stage.generate_groups(rollout_id)
                lengths = [sample.response_length for group in groups for sample in group]
                assert all(lengths), f"samples without a response were returned: lengths {lengths}"
        finally:
            stage.stop()

    def test_evaluation_is_by_data_set(self) -> None:
        """Check the evaluation's form; a function may refuse it with slime's errors.

        The form is `{data set: {"rewards", "truncated", "samples"}}`, with lists of one length.

        For evaluation a rollout function returns `RolloutFnEvalOutput(data, metrics)`, or the mapping.
        """
        stage, _, source = self.stage()
        try:
            data, _ = stage.evaluate_samples(0)
        except (SlimeError, NotImplementedError) as error:
            text = str(error)
            assert "eval-function-path" in text, f"refusing to evaluate must name --eval-function-path; it says {text}"
            pytest.skip(f"it does not evaluate: {text}")
        finally:
            stage.stop()
        assert data, "no data set was evaluated"
        for name, columns in data.items():
            lengths = {key: len(columns[key]) for key in ("rewards", "truncated", "samples") if columns.get(key)}
            assert len(set(lengths.values())) <= 1, f"data set {name!r}: columns differ in length: {lengths}"
            assert all(isinstance(r, (int, float)) for r in columns["rewards"]), (
                f"data set {name!r}: a reward is no number: {columns['rewards']!r:.200}"
            )
        assert not source.drawn, "evaluating draws no training prompts"

    def test_what_the_engine_does_wrong_is_not_hidden(self) -> None:
        """Check that an engine that always fails gives an error, or FAILED samples."""
        self._trains()
        if not traits_of(self.resolved.obj, RolloutTraits).needs_engine:
            pytest.skip("it uses no engine")
        stage, _, _ = self.stage(lambda request: EngineError("out of memory"))
        try:
            groups, _ = stage.generate_groups(0)
        except (SlimeError, asyncio.CancelledError):
            return
        finally:
            stage.stop()
        statuses = {sample.status for group in groups for sample in group}
        assert statuses == {SampleStatus.FAILED}, (
            f"every engine call failed, but the rollout returned samples that are {sorted(s.value for s in statuses)}"
        )
