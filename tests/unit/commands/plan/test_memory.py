"""Memory by arithmetic: shares of a layout, activations, adapters, caches."""

from __future__ import annotations

from typing import Any

from slime_commands.plan.memory import (
    Item,
    Parameters,
    Sharding,
    activation_items,
    engine_items,
    lora_parameters,
    phase_items,
    trainer_items,
)

from slime_core.config import Args
from slime_core.models.family import DecoderShape

SHAPE = DecoderShape(64, 160, 1000, 2, 4, 2, 16)
PARAMETERS = Parameters(total=1_000_000, embeddings=200_000, experts=400_000)


def run_args(**changes: Any) -> Any:
    return Args(**{"micro_batch_size": 1, **changes})


def sizes(items: list[Item]) -> dict[str, float]:
    return {item.name: item.bytes for item in items}


def test_shares_of_a_layout() -> None:
    assert Sharding().share(PARAMETERS) == 1_000_000
    assert Sharding(tensor=2, pipeline=2, expert=4, expert_tensor=1).share(PARAMETERS) == (
        400_000 / 4 + 200_000 / 2 + 400_000 / 8
    )


def test_full_precision_and_mixed() -> None:
    plain = sizes(trainer_items(run_args(), PARAMETERS, SHAPE, Sharding(), longest=100))
    assert (plain["weights"], plain["gradients"], plain["optimizer"]) == (4e6, 4e6, 8e6)
    mixed = Sharding(weight_bytes=2, master_bytes=4, compute_bytes=2, data=4, spread_optimizer=True)
    found = sizes(trainer_items(run_args(), PARAMETERS, SHAPE, mixed, longest=100))
    assert (found["weights"], found["gradients"], found["optimizer"]) == (2e6, 4e6, 12e6 / 4)


def test_fully_sharded() -> None:
    fully = Sharding(data=4, fully=4, gradient_bytes=8, master_bytes=4)
    found = sizes(trainer_items(run_args(), PARAMETERS, SHAPE, fully, longest=10_000, frozen=1))
    assert {name: found[name] for name in ("weights", "gradients", "optimizer", "frozen models")} == {
        "weights": 1e6, "gradients": 2e6, "optimizer": 3e6, "frozen models": 1e6
    }  # fmt: skip
    layer = 800_000 / 2
    assert found["gathered layers"] == 4 * (200_000 + 2 * layer + 200_000 + layer)
    adapted = sizes(trainer_items(run_args(lora_rank=8), PARAMETERS, SHAPE, fully, longest=10_000))
    assert adapted["gradients"] == 8 * lora_parameters(SHAPE, 8) / 4
    assert adapted["gathered layers"] == 4 * (200_000 + 2 * layer)


def test_adapters_critic_and_frozen_models() -> None:
    adapted = sizes(trainer_items(run_args(lora_rank=8), PARAMETERS, SHAPE, Sharding(), longest=1, frozen=1))
    trained = lora_parameters(SHAPE, 8)
    assert trained == 2 * 8 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 160) * 3)
    assert adapted["gradients"] == 4 * trained
    assert "frozen models" not in adapted
    several = run_args(lora_rank=8, lora_adapters=["planner", "solver"])
    assert (
        sizes(trainer_items(several, PARAMETERS, SHAPE, Sharding(), longest=1))["optimizer"] == 3 * adapted["optimizer"]
    )
    one, three = (
        sizes(engine_items(PARAMETERS, SHAPE, size=1, dtype_bytes=2, running=1, longest=1, models=n)) for n in (1, 3)
    )
    assert three["engine weights"] == 3 * one["engine weights"]
    teachers = [Parameters(500_000), Parameters(3_000_000)]
    both = sizes(
        trainer_items(run_args(), PARAMETERS, SHAPE, Sharding(), longest=1, frozen=2, teachers=teachers, critic=True)
    )
    assert (both["weights"], both["frozen models"], both["teachers"]) == (8e6, 8e6, 14e6)


def test_the_update_counts_where_it_is_more_than_a_backward() -> None:
    assert "optimizer's update" in sizes(trainer_items(run_args(), PARAMETERS, SHAPE, Sharding(), longest=1))
    assert "activations" in sizes(trainer_items(run_args(), PARAMETERS, SHAPE, Sharding(), longest=10_000))


def test_activations_and_log_probs() -> None:
    per_layer = (4 * 64 + 2 * 64 + 2 * 32 + 3 * 160) * 4
    found = sizes(activation_items(run_args(), SHAPE, Sharding(), 100, 4 << 20))
    assert found["activations"] == 100 * 3 * per_layer
    assert found["log-probs"] == 4 * 100 * 1000 * 4
    again = sizes(activation_items(run_args(recompute_granularity="full"), SHAPE, Sharding(), 100, 4 << 20))
    assert again["activations"] == 100 * (2 * 64 * 4 + 2 * per_layer)
    chunked = sizes(activation_items(run_args(log_probs_chunk_size=10), SHAPE, Sharding(), 100, 4 << 20))
    assert chunked["log-probs"] == 4 * 10 * 1000 * 4
    spread = Sharding(tensor=2, context=2, sequence_parallel=True)
    assert sizes(activation_items(run_args(), SHAPE, spread, 100, 4 << 20))["activations"] == 100 * 3 * per_layer / 4


def test_engine() -> None:
    found = sizes(engine_items(PARAMETERS, SHAPE, size=2, dtype_bytes=2, running=8, longest=100))
    assert found == {"engine weights": 1e6, "KV cache": 800 * 2 * 2 * 2 * 16 * 2 / 2}
    limited = sizes(engine_items(PARAMETERS, SHAPE, size=1, dtype_bytes=2, running=8, longest=100, limit=64))
    assert limited["KV cache"] == 64 * 2 * 2 * 2 * 16 * 2


def phases_of(*, gpu: bool, offload_train: bool, offload_rollout: bool, overlap: bool = False) -> dict[str, float]:
    sharding = Sharding(weight_bytes=2, master_bytes=4, compute_bytes=2)
    training = trainer_items(run_args(), PARAMETERS, SHAPE, sharding, longest=100, frozen=1, gpu=gpu)
    generating = engine_items(PARAMETERS, SHAPE, size=1, dtype_bytes=2, running=4, longest=100)
    return sizes(
        phase_items(training, generating, offload_train=offload_train, offload_rollout=offload_rollout, overlap=overlap)
    )


def test_each_phase_of_a_shared_device() -> None:
    """Bytes by hand: weights 2, gradients 4, copies 4 + moments 8, a frozen model 2 per parameter; engine 2."""
    training = trainer_items(
        run_args(), PARAMETERS, SHAPE, Sharding(weight_bytes=2, master_bytes=4, compute_bytes=2), longest=100, frozen=1
    )
    busy, cache, engine = sum(sizes(training).values()), 2 * 2 * 2 * 16 * 2 * 400, 2e6
    idle = (2 + 4 + 12 + 2) * 1e6
    both = phases_of(gpu=True, offload_train=False, offload_rollout=False)
    assert both == {
        "generate": idle + engine + cache, "train": busy + engine + cache, "push weights": idle + engine + cache
    }  # fmt: skip
    offloaded = phases_of(gpu=True, offload_train=True, offload_rollout=True)
    left = (2 + 4 + 2) * 1e6  # weights, copies, the frozen model
    assert offloaded == {"generate": left + engine + cache, "train": busy, "push weights": left + engine}
    on_cpu = phases_of(gpu=False, offload_train=True, offload_rollout=True)
    assert on_cpu["generate"] == (2 + 12 + 2) * 1e6 + engine + cache, "moments are in host memory already"
    assert phases_of(gpu=True, offload_train=True, offload_rollout=False)["push weights"] == left + engine + cache
    assert phases_of(gpu=True, offload_train=False, offload_rollout=False, overlap=True) == {
        "generate and train": busy + engine + cache
    }
