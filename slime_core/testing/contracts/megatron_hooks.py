"""The contracts of functions that reach into Megatron: each is used by a Megatron trainer that takes a step.

What a reader would get wrong: they need megatron-core, as their users do.
"""

from __future__ import annotations

from typing import Any, ClassVar

from slime_core.protocols import Args
from slime_core.testing.contracts.base import Contract
from slime_core.testing.contracts.trainer import SPLITS, TrainerContract, example_batch
from slime_core.testing.tiny import tiny_model


class _MegatronHookContract(Contract):
    setting: ClassVar[str]
    """The setting that names the function."""
    default_args: ClassVar[Any] = {**TrainerContract.default_args, "kl_coef": 0.1}

    @property
    def settings(self) -> Args:
        """With a tiny random model and the function under test."""
        own = {"hf_checkpoint": str(tiny_model()), self.setting: self.component, **self.args}
        return super().settings.model_copy(update=own)

    def test_a_trainer_works_with_it(self) -> None:
        """Passes of actor and reference, and an optimizer step, with finite numbers."""
        from slime_trainer_megatron.trainer import MegatronTrainer

        trainer, batch = MegatronTrainer(self.settings), example_batch()
        try:
            for role in ("actor", "ref"):
                for part in trainer.log_probs(batch, SPLITS[1], role=role):
                    assert bool(part.isfinite().all()), f"log-probs of {role} are not finite"
            result = trainer.train_step(batch, SPLITS[1], lambda output: (-output.log_probs.sum() / 14, {}))
            assert result.metrics["skipped_steps"] == 0, "the gradients are not finite"
        finally:
            trainer.close()


class MegatronModelProviderContract(_MegatronHookContract):
    """`(pre_process, post_process[, vp_stage])` -> a model whose parameters have the names of the family's map."""

    kind = "megatron_model_providers"
    setting = "custom_model_provider_path"


class MegatronInitContract(_MegatronHookContract):
    """`(args)`, once Megatron's process groups are there."""

    kind = "megatron_inits"
    setting = "custom_megatron_init_path"


class MegatronBeforeLogProbContract(_MegatronHookContract):
    """`(args, model, store_prefix)`, before passes without gradient."""

    kind = "megatron_before_log_probs"
    setting = "custom_megatron_before_log_prob_hook_path"


class MegatronBeforeTrainStepContract(_MegatronHookContract):
    """`(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)`, before optimizer steps."""

    kind = "megatron_before_train_steps"
    setting = "custom_megatron_before_train_step_hook_path"
