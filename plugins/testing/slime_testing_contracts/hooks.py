"""Contract tests for hooks: of a hook plugin, or of a function that is passed to a hook's flag.

Each test covers one hook and is skipped if the hook is not implemented. The tests of Megatron's hooks need
megatron-core, as the users of these hooks do.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from slime_testing_probes.scripted import ScriptedEngine
from slime_weight_transport_delta.writer import DeltaWriter

from slime_core.config.schema import Args
from slime_core.distributions import normalized
from slime_core.errors import PluginNotFoundError, SlimeError
from slime_core.learning.rollout_data import rollout_data, taken_over
from slime_core.learning.tensors import TrainTensors
from slime_core.plugins.hooks import Hooks, as_plugin, bare_manager, hook_specs
from slime_core.plugins.kinds import HOOK_GROUP, hook_flags
from slime_core.plugins.manager import current_registry, load_hook_module
from slime_core.plugins.registry import ComponentRef
from slime_core.rollout.hooks import RolloutHooks
from slime_core.sample import Group, Sample, SampleStatus
from slime_testing_contracts.base import Contract, only_where
from slime_testing_contracts.loss import example_batch, example_tensors
from slime_testing_contracts.rollout import Prompts
from slime_testing_contracts.samples import answered_sample, scored_group
from slime_testing_contracts.tiny import tiny_model
from slime_testing_contracts.trainer import SPLITS, TrainerContract
from slime_testing_contracts.trainer import example_batch as trainer_batch


def finished_groups() -> list[Group]:
    """Return groups as a rollout ends with: different rewards, and empty, truncated, failed and removed samples."""
    groups = [scored_group([1.0, 0.0, 0.5], 0), scored_group([0.0, 0.0, 1.0], 1)]
    groups[0][1].status = SampleStatus.TRUNCATED
    failed = groups[1][1]
    failed.reset_for_retry()
    failed.group_index, failed.index, failed.status, failed.reward = 1, 101, SampleStatus.FAILED, None
    groups[1][2].remove_sample = True
    for group in groups:
        for sample in group:
            sample.metadata["source_name"] = "sums"
    return groups


def facts(groups: list[Group]) -> list[list[dict[str, Any]]]:
    """Return a copy of the fields of all samples."""
    return [[copy.deepcopy(sample.to_dict()) for sample in group] for group in groups]


def _with(*prefixes: str) -> pytest.MarkDecorator:
    """Limit a test to plugins that implement a hook with one of the prefixes."""

    def holds(case: HookContract) -> bool:
        return any(name.startswith(prefixes) for name in _implemented(type(case)))  # type: ignore[arg-type]

    return only_where(holds)


@cache
def _implemented(case: type[HookContract]) -> frozenset[str]:
    """Return the names of the hooks that the plugin of a suite has; registering it for each test takes seconds."""
    hooks = case().hooks()
    return frozenset(name for name in hook_specs() if hooks.implemented(name))


class HookContract(Contract):
    """Check that hooks change only what they may change, and return values of the right type.

    Either `component` is the entry-point name of a hook plugin, or `kind` is a hook and `component` the path of a
    function for the hook's flag.
    """

    kind = HOOK_GROUP

    @property
    def ref(self) -> ComponentRef:
        """Entry point in `slime.plugins` that `component` names, as `name` or `distribution:name`."""
        distribution, _, name = self.component.rpartition(":")
        for ref in current_registry():
            right = not distribution or normalized(ref.distribution) == normalized(distribution)
            if ref.kind == HOOK_GROUP and ref.name == name and right:
                return ref
        known = ", ".join(ref.name for ref in current_registry() if ref.kind == HOOK_GROUP)
        raise PluginNotFoundError(
            f"no hook plugin {self.component!r}; a hook plugin is found by its name in the entry-point group"
            f" {HOOK_GROUP!r} of an installed distribution. There are: {known or 'none'}"
        )

    @property
    def plugin(self) -> Any:
        """The module, the instance of the class, or the plugin that wraps the function."""
        if self.kind == HOOK_GROUP:
            return load_hook_module(self.ref).obj
        return as_plugin(hook_flags()[self.kind], self.resolved.obj)

    def hooks(self) -> Hooks:
        """Return the hooks of a process that has only this plugin."""
        manager = bare_manager()
        manager.register(self.plugin, name=self.component)
        return Hooks(manager)

    def tells(self, hook: str) -> Callable[..., list[Any]]:
        """Return the function that calls the plugin's hook."""
        found = self.hooks().caller(hook)
        assert found is not None, f"it has no {hook}; the test should have been left out"
        return found

    def tell(self, hook: str, **given: Any) -> None:
        """Call a hook whose return value is not used."""
        answers = self.tells(hook)(**given)
        assert not answers, f"it returned {type(answers[0]).__name__}, which has no effect"

    def load(self) -> None:
        """Load the plugin. Raises SlimeError, also for a hook that slime does not know."""
        _ = self.plugin

    def check_options(self) -> None:
        """Check the options of a function; the run checks a plugin's options, with all plugins that share them."""
        if self.kind != HOOK_GROUP:
            super().check_options()

    def test_it_has_hooks(self) -> None:
        """Check that at least one function is marked `@slime_core.hookimpl`."""
        has = [name for name in hook_specs() if self.hooks().implemented(name)]
        assert has, f"no function is marked @slime_core.hookimpl; slime calls {', '.join(hook_specs())}"

    @_with("slime_save_state")
    def test_its_state_can_be_stored(self) -> None:
        """Check that `slime_save_state` returns JSON values under a key of its own, or None."""
        for state in self.tells("slime_save_state")():
            assert isinstance(state, dict), f"expected a mapping or None; found {type(state).__name__}"
            json.dumps(state)

    # -- a sample ------------------------------------------------------------------------------------

    async def _after(self, sample: Sample, evaluation: bool = False) -> Sample:
        self.tells("slime_sample_generated")
        found = await RolloutHooks.of(self.hooks()).after_generation(self.settings, [sample], 0, evaluation)
        if found[0].status == SampleStatus.FAILED:
            pytest.fail(str(found[0].metadata["failure"]), pytrace=False)
        return found[0]

    @_with("slime_sample_generated")
    @pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
    @pytest.mark.parametrize(
        ("response", "status"),
        [("2", SampleStatus.COMPLETED), ("the ans", SampleStatus.TRUNCATED), ("", SampleStatus.COMPLETED)],
        ids=["completed", "truncated", "empty"],
    )
    def test_a_sample_can_be_trained_on(self, response: str, status: SampleStatus, evaluation: bool) -> None:
        """Check that the hook keeps tokens, log-probs and mask aligned, and keeps prompt, numbers and status."""
        sample = answered_sample(response=response, status=status)
        prompt, index, group_index = list(sample.prompt_tokens), sample.index, sample.group_index
        try:
            found = asyncio.run(self._after(sample, evaluation))
            found.validate()
        except (SlimeError, ValueError) as error:
            pytest.fail(f"the sample cannot be trained on after the hook: {error}", pytrace=False)
        assert found.tokens[: len(prompt)] == prompt, "a sample hook must keep the prompt's tokens"
        assert (found.index, found.group_index) == (index, group_index), "a sample hook must keep index and group_index"
        assert found.status != SampleStatus.PENDING, "the sample is PENDING after the hook; it was finished before"

    @_with("slime_sample_generated")
    def test_one_sample_at_a_time_or_many(self) -> None:
        """Check that overlapping calls of `slime_sample_generated` give the same samples as sequential calls."""
        texts = [f"answer {i}" for i in range(8)]

        async def together() -> list[Sample]:
            return await asyncio.gather(*(self._after(answered_sample(response=text)) for text in texts))

        found = [sample.to_dict() for sample in asyncio.run(together())]
        in_turn = [asyncio.run(self._after(answered_sample(response=text))).to_dict() for text in texts]
        assert found == in_turn, "calls that overlap gave other samples than calls one after the other"

    # -- the end of a rollout ------------------------------------------------------------------------

    @_with("slime_filter_samples")
    def test_a_filter_marks_and_nothing_else(self) -> None:
        """Check that groups and samples keep their places, rewards, tokens and texts."""
        groups = finished_groups()
        before, members = facts(groups), [[id(s) for s in group] for group in groups]
        self.tell("slime_filter_samples", args=self.settings, groups=groups)
        assert [[id(s) for s in group] for group in groups] == members, (
            "groups or samples were taken out, added or moved; mark them with sample.remove_sample = True instead"
        )
        for sample in (sample for group in groups for sample in group):
            right = isinstance(sample.remove_sample, bool)
            assert right, f"sample {sample.index}: remove_sample is True or False; found {sample.remove_sample!r}"
        _assert_kept(before, groups, "remove_sample")

    @_with("slime_filter_samples")
    def test_a_filter_takes_rollouts_of_one_sample(self) -> None:
        """Run the filter on a rollout of one sample, and of none."""
        self.tell("slime_filter_samples", args=self.settings, groups=[scored_group([1.0])])
        self.tell("slime_filter_samples", args=self.settings, groups=[[]])

    @_with("slime_process_all_samples")
    def test_all_samples_are_looked_at_and_not_touched(self) -> None:
        """Check that numbers, tokens, rewards and groups stay the same; metadata may change."""
        groups = finished_groups()
        before = facts(groups)
        given = {"all_groups": groups, "data_source": Prompts(3), "reasons": {1: "zero_std"}}
        self.tell("slime_process_all_samples", args=self.settings, **given)
        assert [len(group) for group in groups] == [len(group) for group in before], "groups or samples were removed"
        _assert_kept(before, groups)

    @_with("slime_log_rollout")
    @pytest.mark.parametrize("count", [1, 6])
    def test_logging_a_rollout_changes_metrics_only(self, count: int) -> None:
        """Check that the hook adds only finite numbers, and returns whether to omit slime's, for any sample count."""
        samples = [s for group in finished_groups() for s in group][:count]
        before, metrics = facts([samples]), {"rollout/other": 1.0}
        tells = self.tells("slime_log_rollout")
        given = {"samples": samples, "extra_metrics": metrics, "rollout_time": 1.5}
        _check_answers(tells(rollout_id=0, args=self.settings, **given), metrics)
        assert facts([samples]) == before, "logging changed the samples, which are still to be trained on"

    @_with("slime_log_eval")
    def test_logging_an_evaluation_changes_metrics_only(self) -> None:
        """Check a data set with samples and an empty data set; the data must not change."""
        samples, tells = scored_group([1.0, 0.0]), self.tells("slime_log_eval")
        held = {"rewards": [1.0, 0.0], "truncated": [False, True], "samples": samples}
        data = {"held": held, "none": {"rewards": [], "truncated": [], "samples": []}}
        before, metrics = facts([samples]), {"eval/other": 1.0}
        settings = self.settings.model_copy(update={"n_samples_per_eval_prompt": 1})
        _check_answers(tells(rollout_id=0, args=settings, data=data, extra_metrics=metrics), metrics)
        assert held["rewards"] == [1.0, 0.0], "logging changed the rewards"
        assert facts([samples]) == before, "logging changed the samples"

    # -- training ------------------------------------------------------------------------------------

    def _train_data(self, tensors: TrainTensors) -> TrainTensors:
        """Return the columns after the hook, as the learner takes them over."""
        data = rollout_data(example_batch(), tensors)
        self.tell("slime_train_data", args=self.settings, rollout_id=0, rollout_data=data)
        try:
            return taken_over(data, tensors, self.component)
        except SlimeError as error:
            pytest.fail(str(error), pytrace=False)

    @_with("slime_train_data")
    def test_columns_of_train_data_keep_their_shapes(self) -> None:
        """Check that columns hold a finite [response_length] tensor per sample, and loss masks hold 0 and 1."""
        found = self._train_data(example_tensors())
        for name in ("advantages", "returns", "old_log_probs", "rollout_log_probs"):
            assert all(torch.isfinite(part).all() for part in getattr(found, name)), f"{name} is not finite after it"

    @_with("slime_train_data")
    def test_columns_that_a_run_may_lack(self) -> None:
        """Run the hook on train data without the engine's, the reference's and the critic's columns."""
        full = example_tensors()
        self._train_data(TrainTensors(full.loss_masks, advantages=full.advantages, returns=full.returns))

    @_with("slime_train_data")
    def test_the_same_train_data_give_the_same(self) -> None:
        """Check that the hook is deterministic, because ranks and resumed runs must agree."""
        one, other = self._train_data(example_tensors()), self._train_data(example_tensors())
        for name in ("loss_masks", "advantages", "returns"):
            for a, b in zip(getattr(one, name), getattr(other, name), strict=True):
                assert torch.equal(a, b), f"{name} differs from call to call"

    @_with("slime_weights_written")
    @pytest.mark.parametrize("version", [1, 2, 3], ids=["names the checkpoint", "delta", "full"])
    def test_weight_files_are_left_as_they_are(self, version: int) -> None:
        """Check a version that only names the checkpoint, a version with a changed tensor, and a whole model."""
        assert self.folder is not None
        directory = _written(self.folder, version)
        before = _contents(directory)
        given = {"version_dir": str(directory), "rollout_engines": [ScriptedEngine([])]}
        self.tell("slime_weights_written", args=self.settings, **given)
        after = _contents(directory)
        changed = sorted(name for name in before if before[name] != after.get(name))
        assert not changed, f"it changed {', '.join(changed)}, which engines are about to read"

    @_with("slime_megatron_")
    def test_a_megatron_trainer_works_with_it(self) -> None:
        """Check that actor and reference passes and an optimizer step give finite numbers."""
        from slime_trainer_megatron.trainer import MegatronTrainer

        own = {**TrainerContract.default_args, "kl_coef": 0.1, "hf_checkpoint": str(tiny_model()), **self.args}
        settings = Args(**{"run_dir": str(self.folder), **own})
        trainer, batch = MegatronTrainer(settings, hooks=self.hooks()), trainer_batch()
        try:
            for role in ("actor", "ref"):
                for part in trainer.log_probs(batch, SPLITS[1], role=role):
                    assert bool(part.isfinite().all()), f"log-probs of {role} are not finite"
            result = trainer.train_step(batch, SPLITS[1], lambda output: (-output.log_probs.sum() / 14, {}))
            assert result.metrics["skipped_steps"] == 0, "the gradients are not finite"
        finally:
            trainer.close()


def _assert_kept(before: list[list[dict[str, Any]]], groups: list[Group], *free: str) -> None:
    """Assert that samples did not change, except for metadata and the fields in `free`."""
    for then, now in zip(before, facts(groups)):
        for one, other in zip(then, now):
            changed = sorted(k for k in other if k not in (*free, "metadata") and one.get(k) != other[k])
            assert not changed, f"sample {one['index']}: it changed {', '.join(changed)}"


def _check_answers(answers: list[Any], metrics: Mapping[str, Any]) -> None:
    odd = [answer for answer in answers if not isinstance(answer, bool)]
    assert not odd, f"a log function returns True (slime's metrics are left out) or False; found {odd[0]!r}"
    wrong = {k: v for k, v in metrics.items() if not isinstance(v, (int, float)) or not math.isfinite(v)}
    assert not wrong, f"metrics are finite numbers; it left {wrong!r}"


def _written(folder: Path, version: int) -> Path:
    """Write a weight version and return its directory."""
    checkpoint, weights = folder / "model", {"a": torch.zeros(64)}
    checkpoint.mkdir()
    save_file(weights, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text("{}", encoding="utf-8")
    writer = DeltaWriter(folder / "weights", checkpoint, run_dir=str(folder))
    if version == 3:
        weights["a"][0] = 1.0
        return writer.write(weights.items(), 3).directory
    written = writer.write(weights.items(), 1)
    if version == 2:
        weights["a"][0] = 1.0
        written = writer.write(weights.items(), 2)
    return written.directory


def _contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
