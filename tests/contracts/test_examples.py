"""The functions of `examples/hooks`, and a built-in that needs more than rewards, by the kit's suites."""

from __future__ import annotations

from pathlib import Path

from slime_testing_contracts import (
    AdvantageContract,
    AllSamplesProcessContract,
    CustomLossContract,
    DataPostprocessContract,
    DataSourceContract,
    EvalLogContract,
    MegatronBeforeLogProbContract,
    MegatronBeforeTrainStepContract,
    MegatronInitContract,
    MegatronModelProviderContract,
    RewardPostProcessContract,
    RolloutContract,
    RolloutLogContract,
    SampleConverterContract,
    SampleFilterContract,
    SampleHookContract,
    WeightPostWriteContract,
)

from slime_core.types import Group

HOOKS = Path(__file__).parents[2] / "examples" / "hooks"


class TestAdvantage(AdvantageContract):
    component = f"{HOOKS}/advantage.py"


class TestDataPostprocess(DataPostprocessContract):
    component = f"{HOOKS}/advantage.py"


class TestDataSource(DataSourceContract):
    component = f"{HOOKS}/data_source.py"


class TestRolloutLog(RolloutLogContract):
    component = f"{HOOKS}/log_functions.py"


class TestWeightPostWrite(WeightPostWriteContract):
    component = f"{HOOKS}/weights_written.py"


class TestMegatronInit(MegatronInitContract):
    component = f"{HOOKS}/megatron_hooks.py"


class TestMegatronModelProvider(MegatronModelProviderContract):
    component = f"{HOOKS}/megatron_hooks.py"
    args = {"custom_megatron_init_path": component}


class TestMegatronBeforeLogProb(MegatronBeforeLogProbContract):
    component = f"{HOOKS}/megatron_hooks.py"


class TestMegatronBeforeTrainStep(MegatronBeforeTrainStepContract):
    component = f"{HOOKS}/megatron_hooks.py"


class TestEvalLog(EvalLogContract):
    component = f"{HOOKS}/log_functions.py"


class TestCustomLoss(CustomLossContract):
    component = f"{HOOKS}/policy_loss.py"


class TestRewardPostProcess(RewardPostProcessContract):
    component = f"{HOOKS}/reward_shaping.py"


class TestConverter(SampleConverterContract):
    component = f"{HOOKS}/reward_shaping.py"


class TestRollout(RolloutContract):
    component = f"{HOOKS}/rollout_function.py"


class TestEvaluation(RolloutContract):
    component = f"{HOOKS}/rollout_function.py:evaluate"
    only_evaluates = True


class TestSampleFilter(SampleFilterContract):
    component = f"{HOOKS}/sample_filter.py"


class TestAllSamples(AllSamplesProcessContract):
    component = f"{HOOKS}/sample_filter.py"


class TestSampleHook(SampleHookContract):
    component = f"{HOOKS}/sample_hook.py"


class TestAsyncSampleHook(SampleHookContract):
    component = f"{HOOKS}/sample_hook.py:note_origin"


class TestDistillation(RewardPostProcessContract):
    """It passes on what a teacher said, which the reward has asked for."""

    component = "on_policy_distillation"

    def prepared(self, groups: list[Group]) -> list[Group]:
        for sample in (sample for group in groups for sample in group):
            sample.teacher_log_probs = [-1.0] * sample.response_length
        return groups
