"""The loss of a user's function: `--loss-type custom_loss --custom-loss-function-path PATH`.

The function gets the logits of whole samples, as in THUDM/slime. `sum_of_sample_mean` divides by the step's rollouts
(or tokens), not the micro-batch's, so what it returns is this micro-batch's share of the mean, and neither loss nor
metrics depend on how samples are split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from slime_core.errors import ConfigError, PluginError
from slime_core.learning.loss import LossBase
from slime_core.learning.rollout_data import columns
from slime_core.learning.tensors import Denominators, TrainTensors, gather
from slime_core.ops.masking import weighted_sum
from slime_core.protocols import AdvantageEstimator, Args, LossFn, MicroBatchOutput
from slime_core.sample import TrainBatch

CustomLossFn = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""(args, batch, logits, sum_of_sample_mean) -> scalar loss and scalar metrics.

`batch`: see `micro_batch_data`. `logits`: float32 [1, T, V] with gradient, of all tokens of the samples,
not divided by the temperature; `slime_core.ops.response_log_probs` makes log-probs of them. `sum_of_sample_mean`: [R]
per-token values of all responses, laid end to end -> their weighted sum."""


class CustomLoss(LossBase):
    """Calls the function of `--custom-loss-function-path` for every micro-batch. Metrics: `loss` and the function's.

    Args:
        args: The run's settings; with `--disable-compute-advantages-and-returns` the batch has no advantages.
        estimator: Not called here.
        function: The user's.

    Raises:
        ConfigError: There is no function.
    """

    needs_logits = True
    needs_function: ClassVar[bool] = True

    def __init__(self, args: Args, estimator: AdvantageEstimator | None, function: CustomLossFn | None = None) -> None:
        if function is None:
            raise ConfigError("CustomLoss needs the function of --custom-loss-function-path PATH")
        super().__init__(args, estimator)
        self.needs_advantages = args.compute_advantages_and_returns
        self._function = function
        self._label = f"--custom-loss-function-path {args.custom_loss_function_path!r}"

    def bind(self, batch: TrainBatch, tensors: TrainTensors, denominators: Denominators) -> LossFn:
        """See `Loss.bind`."""

        def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mask = gather(tensors.loss_masks, output.positions)
            assert mask is not None
            weights = denominators.weights(batch, output.positions, mask)
            data = micro_batch_data(batch, tensors, output)

            def sum_of_sample_mean(values: torch.Tensor) -> torch.Tensor:
                if values.shape != weights.shape:
                    raise PluginError(
                        f"{self._label}: sum_of_sample_mean got shape {tuple(values.shape)}; expected"
                        f" {tuple(weights.shape)}: one value per response token of the micro-batch"
                    )
                return weighted_sum(values, weights)

            return self._checked(self._function(self.args, data, output.logits, sum_of_sample_mean))

        return loss_fn

    def _checked(self, result: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise PluginError(f"{self._label} returned {type(result).__name__}; expected (loss, dict of metrics)")
        loss, metrics = result
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PluginError(f"{self._label} returned a loss of shape {shape}; expected a scalar tensor")
        scalars = {name: torch.as_tensor(value, dtype=torch.float32).detach() for name, value in metrics.items()}
        wrong = [name for name, value in scalars.items() if value.numel() != 1]
        if wrong:
            raise PluginError(f"{self._label} returned metrics that are no scalars: {', '.join(map(str, wrong))}")
        scalars = {str(name): value.reshape(()).to(loss.device) for name, value in scalars.items()}
        return loss.reshape(()), {"loss": loss.detach().reshape(()), **scalars}


def micro_batch_data(batch: TrainBatch, tensors: TrainTensors, output: MicroBatchOutput) -> dict[str, Any]:
    """Return THUDM/slime's `batch` of one micro-batch: `rollout_data` of its samples.

    `unconcat_tokens` are the tokens per sample, and `tokens` [1, T] all of them. `log_probs` are the old policy's; if a
    step is its own old policy, they are the current log-probs without gradient.
    """
    positions = output.positions
    part = batch.select(positions)
    device = output.log_probs.device
    data = part.to_rollout_data()
    lists = [torch.tensor(row, device=device) for row in part.tokens]
    data |= {"unconcat_tokens": lists, "tokens": torch.cat(lists)[None]}
    data |= {key: [column[p] for p in positions] for _, key, column in columns(tensors)}
    if tensors.advantages is not None and tensors.old_log_probs is None:
        data["log_probs"] = list(torch.split(output.log_probs.detach(), part.response_lengths))
    return data
