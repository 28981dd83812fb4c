"""The device mode, and for every fix in it a canary: without the fix upstream still fails.

When a canary fails, megatron-core no longer needs that fix: delete it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from slime_trainer_megatron import cpu_mode
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.model.attention import CoreAttention
from slime_trainer_megatron.process_groups import ProcessGroups
from torch import nn

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so nothing fails without the mode")


# What Megatron does, once per fix.


def current_device() -> None:
    from megatron.core.models.common.embeddings import RotaryEmbedding

    rotary = RotaryEmbedding(kv_channels=8, rotary_percent=1.0, use_cpu_initialization=True)
    assert rotary.get_emb(4).shape == (4, 1, 1, 8)


def synchronize() -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    assert FileSystemWriterAsync.preload_tensors([]) == []


def factory() -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    norm = get_grad_norm_fp32([torch.tensor([3.0, 4.0])], grad_stats_parallel_group=torch.distributed.group.WORLD)
    assert norm == pytest.approx(5.0)


def pinned_memory_and_cuda() -> None:
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

    embedding = torch.arange(4.0).reshape(4, 1)
    assert torch.equal(get_pos_emb_on_this_cp_rank(embedding, 0, torch.distributed.group.WORLD), embedding)


def type_names() -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clip_grad_by_total_norm_fp32([parameter], max_norm=10.0, total_norm=5.0)


def router() -> None:
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    x = torch.ones(2, 3, requires_grad=True)
    router_gating_linear(x, torch.ones(4, 3, requires_grad=True), None, torch.float32).sum().backward()
    assert x.grad is not None


def latent_attention() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig, build_module

    config = MLATransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, attention_dropout=0.0, use_cpu_initialization=True
    )
    spec = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    spec.submodules.core_attention = CoreAttention
    build_module(spec, config=config, layer_number=1)


def dispatcher_stream() -> None:
    _dispatcher()


def dispatcher_splits() -> None:
    dispatcher = _dispatcher()
    hidden, probs = torch.randn(4, 1, 8), torch.full((4, 2), 0.5)
    dispatched = dispatcher.dispatch_preprocess(hidden, torch.ones(4, 2, dtype=torch.bool), probs)
    tokens, _, _ = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*dispatched))
    assert tokens.shape == (8, 8)


def recompute() -> None:
    from megatron.core.tensor_parallel import checkpoint

    waiting = len(torch.cuda._queued_calls)
    x = torch.ones(3, requires_grad=True)
    checkpoint(lambda y: nn.functional.dropout(y, 0.5, training=True), False, x).sum().backward()
    assert len(torch.cuda._queued_calls) == waiting, "calls wait for a GPU that never comes"


def optimizer_state() -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    module = nn.Linear(2, 2, bias=False)
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(_config(), sharded, module)
    settings = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True, params_dtype=torch.float32)
    chained = get_megatron_optimizer(settings, [model], config_overrides={})
    optimizer = getattr(chained, "chained_optimizers", [chained])[0]
    model(torch.ones(1, 2)).sum().backward()
    model.finish_grad_sync()
    assert optimizer.step()[0]
    state = optimizer._get_main_param_and_optimizer_states(module.weight)
    saved = {name: torch.full_like(tensor, 0.25) for name, tensor in state.items() if name != "step"}
    optimizer._set_main_param_and_optimizer_states(module.weight, saved)
    found = optimizer._get_main_param_and_optimizer_states(module.weight)
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def large_gradient() -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    gradient = torch.full((40_000_000,), 1e-4)
    found = get_grad_norm_fp32([gradient], grad_stats_parallel_group=dist.group.WORLD)
    assert found == pytest.approx(float(gradient[0]) * 40_000_000**0.5, rel=1e-5)


SCENARIOS: dict[str, tuple[Callable[[], None], tuple[type[Exception], ...]]] = {
    "current_device": (current_device, (AssertionError, RuntimeError)),
    "synchronize": (synchronize, (AssertionError, RuntimeError)),
    "te_general_gemm": (router, (NameError,)),
    "HAVE_TE": (latent_attention, (TypeError,)),
    "cuda_dtoh_stream": (dispatcher_stream, (AssertionError, RuntimeError)),
    "_maybe_dtoh_and_synchronize": (dispatcher_splits, (AssertionError, RuntimeError)),
    "_get_cuda_rng_state": (recompute, (AssertionError, RuntimeError)),
    "_set_cuda_rng_state": (recompute, (AssertionError, RuntimeError)),
    "_set_main_param_and_optimizer_states": (optimizer_state, (KeyError, RuntimeError)),
    "l2_norm_impl": (large_gradient, (AssertionError,)),
    "mode: factories": (factory, (AssertionError, RuntimeError)),
    "mode: pinned memory": (pinned_memory_and_cuda, (AssertionError, RuntimeError)),
    "mode: names of types": (type_names, (AssertionError,)),
}


def _config() -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=2,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        add_bias_linear=False,
    )


def _dispatcher() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    groups = ProcessGroupCollection.use_mpu_process_groups()
    return MoEAlltoAllTokenDispatcher(2, [0, 1], _config(), pg_collection=groups)


@contextmanager
def mode_without(fix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    complete = list(cpu_mode._fixes())
    kept = [entry for entry in complete if entry[1] != fix]
    if fix.startswith("mode"):
        monkeypatch.setattr(cpu_mode, "_CpuForCuda", nullcontext)
    else:
        assert len(kept) == len(complete) - 1, f"{fix} is no fix"
    monkeypatch.setattr(cpu_mode, "_fixes", lambda: kept)
    with on_device("cpu"):
        yield


def test_every_fix_has_a_canary() -> None:
    here = {name for name in SCENARIOS if not name.startswith("mode")}
    # Needs two ranks: tests/backends/megatron/test_model_ranks.py.
    assert {name for _, name, _ in cpu_mode._fixes()} == {*here, "_gather_along_first_dim"}


@pytest.mark.parametrize("fix", SCENARIOS)
def test_megatron_works_on_a_cpu_in_the_mode(groups: ProcessGroups, fix: str) -> None:
    with on_device("cpu"):
        SCENARIOS[fix][0]()


@no_gpu
@pytest.mark.parametrize("fix", SCENARIOS)
def test_without_the_fix_upstream_fails(groups: ProcessGroups, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, errors = SCENARIOS[fix]
    with mode_without(fix, monkeypatch), pytest.raises(errors):
        scenario()


def test_everything_is_as_before_outside() -> None:
    before = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in cpu_mode._fixes()]
    with on_device("cpu"), on_device("cpu"):
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    with pytest.raises(ZeroDivisionError), on_device("cpu"):
        _ = 1 / 0
    assert [(owner, name, owner.__dict__.get(name)) for owner, name, _ in cpu_mode._fixes()] == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
