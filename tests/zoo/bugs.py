"""The zoo: bugs of trainers that train on without a word, as they were reported, planted into a run of slime.

`after` is the rollout, counted from 1, in which the run's own numbers gave the bug away; `check` is what named it. None: not
caught, and `why` says so. `test_zoo.py` holds every entry to it and the reference page `silent-bugs.md` is made of them.
"""

# ruff: noqa: E501 - a row of the table is a line

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import mean, pstdev, stdev
from typing import Any

import torch

from tests.zoo import mutations as m
from tests.zoo.plant import Plant, nothing, wrapped


@dataclass(frozen=True)
class Bug:
    """One silent bug."""

    name: str
    what: str
    source: str
    """Repository and number of the issue or pull request that reported it, or one like it."""
    plant: Plant
    check: str | None
    after: int = 1
    says: str = ""
    """Words of the printed cause that are this bug's."""
    emulated: str = ""
    """Where the code planted is not the code with the bug: what stands for it, and why."""
    why: str = ""
    """Why it is not caught."""
    settings: Mapping[str, Any] = field(default_factory=dict)


def _shaped(around: Callable[..., Any]) -> Plant:
    return wrapped("slime_estimators.grpo.group_normalize", around)


def _advantages(change: Any) -> Plant:
    return wrapped("slime_core.estimator.EstimatorBase.advantages", m.advantages(change))


def _row(around: Callable[..., Any]) -> Plant:
    return wrapped("slime_core.rollout.batch._Row", around)


def _append(around: Callable[..., Any]) -> Plant:
    return wrapped("slime_core.sample.Sample.append_response_tokens", around)


def _scored(around: Callable[..., Any]) -> Plant:
    return wrapped("slime_embedded.models.decoder.token_log_probs", around)


def _hidden(around: Callable[..., Any]) -> Plant:
    return wrapped("slime_embedded.models.decoder.Decoder.hidden", around)


def _written(*parts: str) -> Plant:
    return wrapped("slime_embedded.engine.weights.FusedWeights.update", m.not_written(*parts))


def _weights(around: Callable[..., Any]) -> Plant:
    return wrapped("slime_core.learning.tensors.Denominators.weights", around)


def _total(change: Any) -> Plant:
    return wrapped("slime_core.learning.loss.PolicyLoss._total", m.total(change))


def _rate(around: Callable[..., Any]) -> Plant:
    return wrapped("slime_embedded.trainer.schedule.LearningRateSchedule.at", around)


def _for_the_reference(target: str, around: Callable[[Any], Any]) -> Plant:
    def plant(patch: Any) -> None:
        now = m.OfTheReference()
        wrapped("slime_embedded.trainer.trainer.EmbeddedTrainer.log_probs", now.watch)(patch)
        wrapped(f"slime_embedded.models.decoder.{target}", around(now))(patch)

    return plant


def _few_prompts(patch: Any) -> None:
    def rows(original: Any, path: Any, count: int) -> Any:
        made = original(path, 4)
        path.write_text(made.read_text().replace("=?", "=?" + " think about it" * 3))
        return made

    wrapped("slime_testing_contracts.tiny.write_rows", rows)(patch)
    wrapped("slime_embedded.engine.core.EngineCore.flush_cache", lambda *_: None)(patch)


def _backward(change: Callable[..., None]) -> Plant:
    def plant(patch: Any) -> None:
        around = m.Backward(change)
        wrapped("slime_embedded.trainer.trainer.EmbeddedTrainer.train_step", around.step)(patch)
        wrapped("torch.autograd.backward", around.backward)(patch)

    return plant


def _update(around: Callable[..., None]) -> Plant:
    return wrapped("slime_embedded.trainer.optimizer.FlatAdamW._update", around)


def _handed_out() -> Plant:
    def plant(patch: Any) -> None:
        wrapped("slime_embedded.trainer.trainer.published_weights", m.as_at_first("layers.0.input_layernorm"))(patch)

    return plant


def _first_rate(optimizer: Any, lr: float) -> float:
    return optimizer.__dict__.setdefault("first_rate", lr)


_in_the_update, _before_it = torch.is_grad_enabled, lambda: not torch.is_grad_enabled()
_KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
_ONE = {"rollout_max_response_len": 1, "n_samples_per_prompt": 8, "rollout_temperature": 0.1}
_COLD = {"rollout_temperature": 0.5}
_PLAIN = {"advantage_estimator": "reinforce_plus_plus", "micro_batch_size": 4}
_TOKENS = {"rewards_normalization": False, "calculate_per_token_loss": True}
_OWN = {"use_rollout_entropy": True}
_STOPS = {"rollout_stop_token_ids": [*range(200, 272)]}
_LINEAR = {"lr_decay_style": "linear", "num_rollout": 5}
_TOOL = {"custom_generate_function_path": "tests.zoo.components:with_tool"}


def _reward(name: str, **settings: Any) -> dict[str, Any]:
    return {"custom_rm_path": f"tests.zoo.components:{name}", **settings}


def _filter(name: str) -> dict[str, Any]:
    return {"rollout_sample_filter_path": f"tests.zoo.components:{name}"}


BUGS = (
    # -- rewards and groups
    Bug("std_biased", "the standard deviation divides by n", "NVIDIA/TorchFort #38",
        _shaped(m.by_group(lambda own, x, r: (x - mean(own)) / (pstdev(own) + 1e-6))), "advantages_deviate_by_one", says="biased"),
    Bug("rows_left_over", "rows after the last whole group are divided by a deviation of 0", "areal-project/AReaL #1673", _shaped(m.by_stride),
        "advantages_add_up", says="the mean is not the group's", settings=_filter("remove_some")),
    Bug("mean_of_the_batch", "mean and deviation are taken over the batch", "XU-YIJIE/grpo-flat #2",
        _shaped(m.by_group(lambda own, x, r: (x - mean(r)) / (stdev(r) + 1e-6))), "advantages_add_up", says="the mean is not the group's"),
    Bug("mean_of_the_first", "only the first rollout makes the mean", "ServiceNow/PipelineRL #54",
        _shaped(m.by_group(lambda own, x, r: (x - own[0]) / (stdev(own) + 1e-6))), "advantages_add_up", says="the mean is not the group's"),
    Bug("mean_of_other_rewards", "rewards are corrected for length, and the mean is of those before", "PrimeIntellect-ai/prime-rl #2040",
        _shaped(m.by_group(lambda own, x, r: (0.8 * x - mean(own)) / (stdev(own) + 1e-6))), "advantages_add_up", says="the mean is not the group's",
        emulated="every reward is shortened alike, as slime corrects none for length"),
    Bug("sign_by_the_mean", "rewards are divided by their mean, which is below 0: the worse answer is encouraged", "huggingface/trl #5026",
        _shaped(m.by_group(lambda own, x, r: (x - mean(own)) / (mean(own) + 1e-4))), "better_is_better", says="a sign is turned", settings=_reward("penalty")),
    Bug("siblings_counted", "a rollout that was split into several samples counts several times", "radixark/miles #2378",
        _shaped(m.without_siblings), "advantages_add_up", says="parts of a rollout count as rollouts", settings={"custom_generate_function_path": "tests.zoo.components:in_parts"}),
    Bug("uneven_groups", "groups of different sizes are normalised as one", "THUDM/slime #1918",
        _shaped(m.one_group_if_uneven), "advantages_add_up", says="the mean is not the group's", settings=_filter("remove_some")),
    Bug("rejected_in_baseline", "rejected rows stay in the baseline", "verl-project/verl #6452", _row(m.counted_though_removed), "advantages_add_up", says="rows that are not trained on count",
        settings=_filter("remove_one")),
    Bug("rewards_stay_behind", "rows are reordered to balance micro-batches, their rewards are not", "verl-project/verl #2185",
        wrapped("slime_core.sample.TrainBatch.select", m.rewards_stay_behind), "advantage_of_its_sample", says="rows are in another order",
        settings={"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_by_flops": True}),
    Bug("advantages_broadcast", "advantages of another shape are broadcast over all rows", "McGill-NLP/nano-aha-moment #10", _advantages(m.broadcast),
        "advantage_of_its_sample", says="broadcast",
        emulated="the mean over the rows that came of it, as slime has tokens in one row"),
    Bug("advantage_sign", "the sign of the advantage's weight is turned", "billy-enrizky/openbrowser-ai #48", _advantages(lambda a: [-x for x in a]),
        "advantage_of_its_sample", says="the sign is turned"),
    Bug("discounted", "advantages are discounted by their position in the answer", "huggingface/trl #6626",
        _advantages(lambda a: [x * 0.95 ** torch.arange(len(x)) for x in a]), "advantage_of_its_sample", says="discounted"),
    Bug("whitened_twice", "normalised advantages are normalised once more over the batch", "amazon-science/reskill #12", _advantages(m.whitened),
        "advantage_of_its_sample", says="scaled"),
    Bug("reward_of_the_prompt", "the reward is that of the prompt", "huggingface/trl #6952", nothing, "rewards_tell_answers_apart", 3, says="reads the prompt",
        settings=_reward("of_the_prompt")),
    Bug("one_reward_for_all", "a reward that is one number is broadcast to its group", "huggingface/trl #6533", nothing, "rewards_tell_answers_apart", 3, says="one reward goes to the whole group",
        settings=_reward("one_for_all", group_rm=True, rollout_max_response_len=24)),
    Bug("always_right", "the grader says yes to everything", "huggingface/cookbook #335", nothing, "samples_carry_gradient", 3, says="always says the same",
        settings=_reward("always_right")),
    Bug("reward_at_random", "the reward does not depend on the answer", "inclusionAI/AReno #223", nothing, "reward_of_the_answer", says="the grader is random",
        settings=_reward("at_random", **_ONE)),
    Bug("rewards_mispaired", "rewards come in another order than the answers, which are short", "huggingface/trl #6228", nothing, "reward_of_the_answer", says="rewards are paired with other samples",
        settings=_reward("as_they_come", group_rm=True, **_ONE)),
    Bug("texts_mispaired", "texts are paired with other requests' tokens, short answers", "huggingface/trl #6673",
        wrapped("slime_embedded.engine.core.EngineCore.text", m.text_of_the_request_before), "text_of_the_tokens", says="texts and samples are mispaired", settings=_ONE),
    Bug("failed_scored", "a failed rollout is scored 0 and trains", "THUDM/slime #1252",
        wrapped("slime_core.sample.Sample.fail", m.scored_though_failed), "failed_not_scored", says="failed samples are scored", settings=_reward("breaks")),
    Bug("group_mixed", "groups are taken from prompts that are laid out in another order", "PrimeIntellect-ai/prime-rl #600",
        wrapped("slime_core.data.prompts.DatasetSource._number", m.numbered_across), "group_of_one_prompt", says="samples regrouped"),
    Bug("negative_dropped", "negative advantages are set to 0", "huggingface/trl #6094", _advantages(lambda a: [x.clamp(min=0) for x in a]),
        "advantage_of_its_sample", says="clipped"),
    Bug("sign_lost", "negative advantages lose their sign", "jvmncs/safe-grid-agents #28", _advantages(lambda a: [x.abs() for x in a]), "advantage_of_its_sample",
        says="the sign is turned"),
    Bug("advantage_of_the_one_before", "each sample has the advantage of the sample before", "verl-project/verl #2185",
        _advantages(lambda a: [torch.full_like(x, float(a[i - 1][0])) for i, x in enumerate(a)]), "advantage_of_its_sample", says="rows are in another order"),
    Bug("groups_shuffled", "samples are shuffled after they were scored, and grouped by their new places", "NVIDIA-NeMo/RL #3882",
        wrapped("slime_core.rollout.batch._group_indices", m.groups_shuffled), "group_of_one_prompt", says="shuffled"),
    Bug("reward_clipped", "rewards are clipped between the grader and the estimator", "openai/baselines #216",
        wrapped("slime_core.rollout.batch._reward", m.clipped_reward), "rewards_as_scored", says="clipped", settings={"rollout_max_response_len": 24}),
    Bug("reward_clipped_in_groups", "rewards are clipped as they are compared in their groups", "openai/baselines #216",
        _shaped(lambda f, rewards, *rest: f([min(r, 0.03) for r in rewards], *rest)), "rewards_as_scored", says="clipped", settings={"rollout_max_response_len": 24}),
    Bug("text_of_another_tokenizer", "another tokenizer makes the text that is scored", "TIGER-AI-Lab/General-Reasoner #2",
        wrapped("slime_embedded.engine.core.EngineCore.text", m.digits_exchanged), "text_of_the_tokens", says="another tokenizer decodes",
        emulated="two pairs of characters are exchanged in the text"),
    Bug("seeds_shared", "the samples of a group share a seed", "verl-project/verl #6857",
        wrapped("slime_core.rollout.generate.sampling_seed", m.one_seed_a_group), "answers_differ", says="share a seed"),
    # -- tokens
    Bug("mask_late", "the mask is shifted by one to the right", "verl-project/verl #3287", _row(m.mask(lambda row, own: [0, *own[:-1]])), "first_token_trains", says="the mask is shifted by one"),
    Bug("mask_early", "the mask is shifted by one to the left", "verl-project/verl #3562", _row(m.mask(lambda row, own: [*own[1:], 0])), "end_trains", says="the mask is a token short"),
    Bug("end_masked", "the end token is also the padding token, and masked as such", "foundation-model-stack/fms-hf-tuning #436", _row(m.mask(m.padding_masked)),
        "end_trains", says="EOS is masked as padding", settings=_STOPS),
    Bug("tool_output_trains", "tool output is in the loss mask", "THUDM/slime #1418", _row(m.mask(lambda row, own: [1] * len(own))),
        "mask_within_the_sampled", says="tool output is in it", settings=_TOOL),
    Bug("versions_counted_twice", "a token's version is one too high", "PrimeIntellect-ai/prime-rl #1764",
        wrapped("slime_embedded.engine.core.EngineCore.set_version", lambda f, core, version, *a: f(core, version + 1, *a)), "versions_exist", says="versions are counted twice"),
    Bug("two_bos", "the tokenizer adds a BOS to a template that has one", "OpenRLHF/OpenRLHF #393",
        wrapped("slime_core.data.rows.rendered_spans", m.start_twice), "one_start_token", says="the tokenizer adds a BOS",
        emulated="the template's first token is given twice, as the model has no BOS"),
    Bug("rendered_again", "an answer is rendered again to be trained on, as other tokens than were sampled", "huggingface/trl #6363",
        _append(m.tokens_of_the_text), "engine_is_the_trainer", says="tokens"),
    # -- log-probs
    Bug("log_probs_shifted", "the engine's log-probs are shifted by one", "modelscope/ms-swift #8196", _append(m.appended(lambda x: [*x[1:], x[0]])),
        "engine_is_the_trainer", says="log-probs that are shifted"),
    Bug("log_probs_of_others", "the engine puts tokens back in the order of the requests, and log-probs not", "PaddlePaddle/FastDeploy #7773",
        wrapped("slime_embedded.engine.core.EngineCore._append", m.of_the_next_request), "engine_is_the_trainer", says="another request's"),
    Bug("log_probs_padded", "log-probs that are missing are filled up with 0", "vllm-project/vime #70", _append(m.appended(lambda x: [*x[:-2], 0.0, 0.0])),
        "engine_is_the_trainer", says="filled up"),
    Bug("untempered_trainer", "the trainer does not divide by the temperature", "huggingface/trl #3029", _scored(m.temperature(lambda t: 1.0)),
        "engine_is_the_trainer", says="temperature", settings=_COLD),
    Bug("untempered_engine", "the engine's log-probs are those of temperature 1", "huggingface/trl #4159",
        wrapped("slime_embedded.engine.sampler.SamplingBatch.sample", m.at_temperature_one), "engine_is_the_trainer", says="temperature", settings=_COLD),
    Bug("temperature_twice", "the temperature is applied twice", "NVIDIA-NeMo/RL #660", _scored(m.temperature(lambda t: t * t)), "engine_is_the_trainer", says="temperature",
        settings=_COLD),
    Bug("targets_shifted", "the trainer's labels are shifted by one", "PrimeIntellect-ai/prime-rl #1525", _scored(m.labels_shifted), "engine_is_the_trainer", says="labels"),
    Bug("positions_shifted", "positions are shifted together with the inputs", "PrimeIntellect-ai/prime-rl #1525",
        wrapped("slime_embedded.models.decoder.rope_cos_sin", m.positions_shifted), "engine_is_the_trainer", says="positions", settings={"dtype": "float32"}),
    Bug("packing_leaks", "packed samples attend to each other", "NVIDIA-NeMo/RL #2105",
        wrapped("slime_embedded.models.decoder.Decoder.hidden", m.as_one_sequence(lambda: True)), "engine_is_the_trainer", says="attention", settings={"micro_batch_size": 8}),
    Bug("dropout", "dropout is on in the trainer", "huggingface/trl #4", _hidden(m.dropped(_in_the_update)), "engine_is_the_trainer", says="dropout"),
    Bug("dropout_between_passes", "dropout is on in the update and off in the pass before it", "huggingface/trl #4", _hidden(m.dropped(_in_the_update)),
        "passes_agree", says="dropout is on", settings=_OWN),
    Bug("old_without_mask", "old log-probs are computed without the attention mask", "CarperAI/trlx #107",
        wrapped("slime_embedded.models.decoder.Decoder.hidden", m.as_one_sequence(_before_it)), "passes_agree", says="attention", settings={"micro_batch_size": 8, **_OWN}),
    Bug("old_untempered", "old log-probs are of another temperature than new ones", "huggingface/trl #454",
        _scored(m.temperature(lambda t: 1.0, _before_it)), "ratio_begins_at_one", says="of another temperature", settings=_OWN | _COLD),
    Bug("temperature_now_and_then", "every third pass of the trainer is at temperature 1", "huggingface/trl #3029", _scored(m.temperature(lambda t: 1.0, m.EveryThird())),
        "engine_is_the_trainer", says="temperature", settings=_COLD | {"micro_batch_size": 4, "dtype": "float32"}),
    # -- weights
    Bug("tensor_not_sent", "one tensor is not sent to the engine", "verl-project/verl #205", _written("layers.0.mlp"), "engine_serves_the_trained", 2, says="a tensor is not sent"),
    Bug("norm_not_sent", "the engine skips tensors that it knows by another name", "Tencent-Hunyuan/UniRL #166", _written("model.norm"),
        "engine_serves_the_trained", 2, says="a tensor is not sent",
        emulated="a tensor is skipped under its own name, as engine and trainer use the same ones"),
    Bug("layer_norm_not_sent", "one layer's norm is not sent to the engine", "huggingface/trl #5269", _written("layers.0.input_layernorm"),
        "engine_serves_the_trained", 2, says="a tensor is not sent"),
    Bug("norm_handed_out_once", "the trainer hands out one layer's norm as it was at first, so that comparing what is served finds nothing", "huggingface/trl #5269",
        _handed_out(), "every_tensor_is_sent",
        says="never hands out", settings={"check_weight_update_equal": True}),
    Bug("embeddings_not_sent", "tied embeddings are not sent to the engine", "PrimeIntellect-ai/prime-rl #2823", _written("embed_tokens"),
        "engine_serves_the_trained", 2, says="a tensor is not sent"),
    Bug("engine_asleep", "the engine keeps the weights that it started with", "huggingface/trl #5312",
        wrapped("slime_embedded.engine.core.EngineCore.update_weights", m.only_the_number), "engine_serves_the_trained", 2, says="an older version"),
    Bug("adapter_not_sent", "the adapter is not in the weights that the engine gets", "verl-project/verl-omni #553",
        wrapped("slime_embedded.trainer.trainer.published_weights", m.base_only), "engine_serves_the_trained", 2, says="an adapter is not merged",
        settings={"lora_rank": 8, "lr": 3e-2}),
    Bug("stale_prefixes", "prefixes that older weights computed are used after a weight update", "NVIDIA-NeMo/RL #4018", _few_prompts,
        "engine_serves_the_trained", 2, says="a cache of older weights", settings={"lr": 1e-2}),
    Bug("optimizer_of_a_copy", "the optimizer updates a copy of the weights", "huggingface/accelerate #3209",
        wrapped("slime_embedded.trainer.optimizer.FlatAdamW.__init__", m.of_a_copy), "weights_move", 2, says="the optimizer holds other tensors"),
    Bug("tensor_left_out", "a parameter is in none of the optimizer's groups", "zjunlp/HVPNeT #5",
        wrapped("slime_embedded.trainer.trainer.trained_parameters", m.without_queries), "every_tensor_moves", 4, says="the optimizer leaves it out"),
    Bug("tensor_detached", "no gradient reaches some of the trained tensors", "locuslab/open-unlearning #178",
        wrapped("slime_embedded.models.decoder.rotate", m.detached), "gradient_of_every_tensor", 3, says="detached"),
    # -- reference
    Bug("reference_follows", "the reference is updated in every iteration", "aburkov/theLMbook #8",
        wrapped("slime_core.learning.learner.Learner.train", m.reference_follows), "reference_stays", 3, says="is updated", settings=_KL),
    Bug("reference_drifts", "the reference is a moving average of the policy", "huggingface/trl #4935",
        wrapped("slime_core.learning.learner.Learner.train", m.reference_drifts), "reference_is_kept", 3, says="drifts", settings=_KL),
    Bug("reference_untempered", "the reference's log-probs ignore the temperature", "OpenRLHF/OpenRLHF #853",
        _for_the_reference("token_log_probs", lambda now: m.temperature(lambda t: 1.0, now)), "reference_is_the_start", says="temperature", settings=_KL | _COLD),
    Bug("reference_dropout", "dropout is on in the reference", "modelscope/ms-swift #7828", _for_the_reference("Decoder.hidden", m.dropped),
        "reference_is_the_start", says="dropout", settings=_KL),
    Bug("reference_of_others", "the reference is another model than the one that training starts from", "huggingface/trl #1340",
        wrapped("slime_embedded.trainer.trainer.EmbeddedTrainer._load_frozen", m.another_model), "reference_is_the_start",
        says="other weights", emulated="the model with noise, where it was the base of an adapter", settings=_KL),
    # -- the step
    Bug("ratio_detached", "the importance ratio is a constant", "Goekdeniz-Guelmez/mlx-lm-lora #55",
        wrapped("slime_core.estimator.token_kl", lambda f, *a: torch.zeros_like(f(*a))), "gradient_there", says="detached"),
    Bug("kl_maximised", "the KL is subtracted from the loss", "Unakar/Logic-RL #58",
        _total(lambda args, loss, terms: -2 * args.kl_loss_coef * terms["kl_loss"]), "loss_of_its_terms", 2, says="wrong sign", settings=_KL | {"lr": 1e-2}),
    Bug("kl_negative", "the KL is computed with the wrong sign", "marin-community/marin #1708",
        wrapped("slime_core.learning.loss.PolicyLoss._kl", lambda f, *a: -f(*a)), "kl_not_negative", 2, says="wrong sign", settings=_KL | {"lr": 1e-2}),
    Bug("kl_twice", "the KL is applied twice", "verl-project/verl #265",
        _total(lambda args, loss, terms: args.kl_loss_coef * terms["kl_loss"]), "loss_of_its_terms", 2, says="factor", settings=_KL | {"lr": 1e-2}),
    Bug("entropy_sign", "the entropy is punished", "BerkinChen/AlphaSAGE #2",
        _total(lambda args, loss, terms: 2 * args.entropy_coef * terms["entropy_loss"]), "loss_of_its_terms", says="wrong sign", settings={"entropy_coef": 0.01}),
    Bug("loss_sign", "the policy loss is negated twice", "fla-org/flash-linear-attention #1073",
        wrapped("slime_core.estimator.clipped_surrogate", lambda f, *a: (-f(*a)[0], f(*a)[1])), "loss_of_the_batch", says="the sign is turned", settings=_PLAIN),
    Bug("accumulation_averaged", "the mean of micro-batches is divided once more", "modelscope/ms-swift #10117", _weights(m.mean_of_means),
        "loss_of_the_batch", says="micro-batches", settings=_PLAIN),
    Bug("accumulation_summed", "micro-batches are added up, each with its own mean", "huggingface/trl #3021", _weights(m.own_mean), "loss_of_the_batch", says="micro-batches each for itself",
        settings=_PLAIN),
    Bug("padding_in_the_mean", "padding is counted in the mean", "NovaSky-AI/SkyRL #462", _weights(m.over_padding), "loss_of_the_batch", says="padding",
        settings=_TOKENS | _STOPS | _reward("penalty")),
    Bug("masked_in_the_mean", "tokens that are masked are counted in the mean", "huggingface/trl #6369", _weights(m.over_masked), "loss_of_the_batch", says="tokens that are masked",
        settings=_TOKENS | _TOOL | _reward("penalty")),
    Bug("last_not_run", "the last micro-batch of a step is not run", "timoschick/pet #36",
        wrapped("slime_embedded.trainer.trainer.EmbeddedTrainer.train_step", m.last_not_run), "gradient_of_the_loss", says="a micro-batch's is lost", settings={"micro_batch_size": 4}),
    Bug("last_not_propagated", "the last micro-batch's loss is reported, and nothing is propagated from it", "ml-explore/mlx-lm #1413", _backward(m.skipping_the_last),
        "gradient_of_the_loss", says="a micro-batch's is lost", settings={"micro_batch_size": 4}),
    Bug("last_gradient_lost", "the last micro-batch's gradient does not reach the optimizer", "ml-explore/mlx-lm #1413", _backward(m.losing_the_last),
        "gradient_of_every_pass", 2, says="one is lost", settings={"micro_batch_size": 4}),
    Bug("means_of_uneven", "micro-batches of uneven sizes are averaged in the gradient only", "verl-project/verl #5625", _backward(m.each_with_its_mean),
        "gradient_of_the_loss", says="a mean of its own", settings={"micro_batch_size": 5}),
    Bug("backward_scaled", "gradients are scaled and the loss is not", "NVIDIA/Megatron-LM #906",
        wrapped("torch.autograd.backward", lambda f, loss: f(loss / 4)), "gradient_of_the_loss", says="it is scaled"),
    Bug("last_micro_batch", "gradients are cleared before each micro-batch, and the last one's are left", "pytorch/torchtitan #3575",
        wrapped("slime_embedded.trainer.trainer.EmbeddedTrainer._output", m.cleared_before_each), "gradient_of_every_pass", 2, says="cleared between them",
        settings={"micro_batch_size": 4}),
    Bug("prompt_in_the_mean", "the prompt's tokens are counted in the mean", "huggingface/trl #6369",
        _weights(lambda f, step, batch, *a: f(replace(step, num_tokens=sum(map(len, batch.tokens))), batch, *a)), "loss_of_the_batch", says="prompt", settings=_TOKENS | _reward("penalty")),
    Bug("bounds_exchanged", "the bounds of the clipping are exchanged", "ChenmienTan/RL2 #21", wrapped("slime_core.estimator.clipped_surrogate", m.bounds_exchanged),
        "gradient_of_the_loss", says="the clipping", settings={"eps_clip": 0.05, "eps_clip_high": 0.3, "num_steps_per_rollout": 2, "lr": 1e-2}),
    Bug("rate_stays", "the optimizer keeps its first learning rate, and the schedule's is reported", "huggingface/transformers #2331",
        _update(m.rate_of_the_optimizer(_first_rate)), "update_as_set", 2, says="the schedule does not reach it", settings=_LINEAR),
    Bug("rate_stays_two_steps", "the same with two steps a rollout", "huggingface/transformers #2331",
        _update(m.rate_of_the_optimizer(_first_rate)), "update_as_set", 2, says="the schedule does not reach it", settings=_LINEAR | {"num_steps_per_rollout": 2}),
    Bug("rate_a_tenth", "the optimizer uses a tenth of the learning rate", "pytorch/pytorch #22107", _update(m.rate_of_the_optimizer(lambda _, lr: lr / 10)),
        "update_as_set", 2, says="it is scaled"),
    Bug("rate_a_tenth_four_steps", "the same with four steps a rollout", "pytorch/pytorch #22107", _update(m.rate_of_the_optimizer(lambda _, lr: lr / 10)),
        "update_as_set", 2, says="it is scaled", settings={"num_steps_per_rollout": 4}),
    Bug("no_bias_correction", "Adam's moments are not corrected for their start at 0", "allenai/OLMo-core #317", _update(m.without_bias_correction), "update_as_set", 2,
        says="bias correction is missing"),
    Bug("lr_scaled", "the learning rate is multiplied by the number of processes", "mala-project/mala #422", _rate(lambda f, s, n: 8 * f(s, n)),
        "learning_rate_as_set", says="scaled",
        emulated="by eight, in one process"),
    Bug("lr_over", "the schedule has as many steps as rollouts, and there are two steps a rollout", "NovaSky-AI/SkyRL #873",
        wrapped("slime_embedded.trainer.schedule._total_steps", lambda f, *a: f(*a) // 2), "learning_rate_as_set", 3,
        says="of another length", settings=_LINEAR | {"num_steps_per_rollout": 2}),
    Bug("lr_by_processes", "the schedule goes a step on for each process", "huggingface/accelerate #2926", _rate(lambda f, s, n: f(s, 8 * n)),
        "learning_rate_as_set", 2, says="of another length or unit",
        emulated="eight steps, in one process", settings=_LINEAR),
    Bug("lr_by_micro_batches", "the schedule counts micro-batches as steps", "starVLA/starVLA #210", _rate(lambda f, s, n: f(s, 4 * n)),
        "learning_rate_as_set", 3, says="unit", settings=_LINEAR),
    # -- not caught
    Bug("top_p_in_training", "top-p sampling in training, log-probs of the whole distribution", "verl-project/verl #6240", nothing, None,
        why="log-probs agree; warned of when the run starts, with `--use-sampling-mask` as the way out", settings={"rollout_top_p": 0.5}),
    Bug("labels_of_other_rows", "answers are graded by the labels of other rows", "allenai/open-instruct #1484",
        wrapped("slime_core.data.prompts.DatasetSource._number", m.label_of_the_row_before), None, why="a label that is wrong is a label"),
)  # fmt: skip

SOUND: dict[str, dict[str, Any]] = {
    "plain": {},
    "steps": {"num_steps_per_rollout": 2},
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "cold": {"rollout_temperature": 0.7},
    "long": {"rollout_max_response_len": 48, "calculate_per_token_loss": True},
    "ppo": {"advantage_estimator": "ppo", "num_steps_per_rollout": 2},
    "whitened": {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
    "unwhitened": {"advantage_estimator": "reinforce_plus_plus"},
    "cispo": {"advantage_estimator": "cispo"},
    "async": {"async_training": True},
    "interval": {"async_training": True, "update_weights_interval": 2},
    "entropy": {"entropy_coef": 0.01, "use_rollout_entropy": True},
    "nearly equal": _reward("nearly_equal"),
    "own advantages": {"custom_advantage_function_path": "tests.zoo.components:own_advantages"},
    "lora": {"lora_rank": 8, "lr": 1e-2},
    "float32": {"dtype": "float32", "rollout_temperature": 0.7},
    "linear": {"lr_decay_style": "linear", "num_steps_per_rollout": 2},
    "balanced": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_by_flops": True},
    "tool": {"custom_generate_function_path": "tests.zoo.components:with_tool"},
    "parts": {"custom_generate_function_path": "tests.zoo.components:in_parts"},
    "removed": {"rollout_sample_filter_path": "tests.zoo.components:remove_one"},
    "failing": {"custom_rm_path": "tests.zoo.components:breaks"},
    "dynamic sampling": {"dynamic_sampling_filter_path": "nonzero_std", "rollout_max_response_len": 24},
    "stopping": {"rollout_stop_token_ids": [*range(200, 272)], "async_training": True, "num_steps_per_rollout": 2},
}
