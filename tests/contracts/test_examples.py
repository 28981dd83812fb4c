"""The functions of `examples/hooks`, and a built-in that needs more than rewards, by the kit's suites."""

from __future__ import annotations

from pathlib import Path

from slime_testing_contracts import (
    AdvantageContract,
    CustomLossContract,
    DataSourceContract,
    HookContract,
    MegatronModelProviderContract,
    RewardPostProcessContract,
    RolloutContract,
    SampleConverterContract,
)

from slime_core.sample import Group

HOOKS = Path(__file__).parents[2] / "examples" / "hooks"


class TestAdvantage(AdvantageContract):
    component = f"{HOOKS}/advantage.py"


class TestDataPostprocess(HookContract):
    kind = "slime_train_data"
    component = f"{HOOKS}/advantage.py"


class TestDataSource(DataSourceContract):
    component = f"{HOOKS}/data_source.py"


class TestRolloutLog(HookContract):
    kind = "slime_log_rollout"
    component = f"{HOOKS}/log_functions.py"


class TestWeightPostWrite(HookContract):
    kind = "slime_weights_written"
    component = f"{HOOKS}/weights_written.py"


class TestMegatronInit(HookContract):
    kind = "slime_megatron_init"
    component = f"{HOOKS}/megatron_hooks.py"


class TestMegatronModelProvider(MegatronModelProviderContract):
    component = f"{HOOKS}/megatron_hooks.py"
    args = {"custom_megatron_init_path": component}


class TestMegatronBeforeLogProb(HookContract):
    kind = "slime_megatron_before_log_prob"
    component = f"{HOOKS}/megatron_hooks.py"


class TestMegatronBeforeTrainStep(HookContract):
    kind = "slime_megatron_before_train_step"
    component = f"{HOOKS}/megatron_hooks.py"


class TestEvalLog(HookContract):
    kind = "slime_log_eval"
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


class TestSampleFilter(HookContract):
    kind = "slime_filter_samples"
    component = f"{HOOKS}/sample_filter.py"


class TestAllSamples(HookContract):
    kind = "slime_process_all_samples"
    component = f"{HOOKS}/sample_filter.py"


class TestSampleHook(HookContract):
    kind = "slime_sample_generated"
    component = f"{HOOKS}/sample_hook.py"


class TestAsyncSampleHook(HookContract):
    kind = "slime_sample_generated"
    component = f"{HOOKS}/sample_hook.py:note_origin"


class TestDistillation(RewardPostProcessContract):
    """It passes on what a teacher said, which the reward has asked for."""

    component = "on_policy_distillation"

    def prepared(self, groups: list[Group]) -> list[Group]:
        for sample in (sample for group in groups for sample in group):
            sample.teacher_log_probs = [-1.0] * sample.response_length
        return groups
