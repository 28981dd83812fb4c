"""The contract of functions that build Megatron's model: a Megatron trainer takes a step with the model.

It needs megatron-core, as such functions do.
"""

from __future__ import annotations

from typing import Any, ClassVar

from slime_core.protocols import Args
from slime_testing_contracts.base import Contract
from slime_testing_contracts.tiny import tiny_model
from slime_testing_contracts.trainer import SPLITS, TrainerContract, example_batch


class MegatronModelProviderContract(Contract):
    """Contract: `(pre_process, post_process[, vp_stage])` -> a model with parameter names of the family's map."""

    kind = "megatron_model_providers"
    default_args: ClassVar[Any] = {**TrainerContract.default_args, "kl_coef": 0.1}

    @property
    def settings(self) -> Args:
        """Settings with a tiny random model and the function under test."""
        own = {"hf_checkpoint": str(tiny_model()), "custom_model_provider_path": self.component, **self.args}
        return super().settings.model_copy(update=own)

    def test_a_trainer_works_with_it(self) -> None:
        """Check that passes of actor and reference, and an optimizer step, give finite numbers."""
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
