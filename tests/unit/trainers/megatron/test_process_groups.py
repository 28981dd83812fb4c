from __future__ import annotations

import pytest
import torch
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.process_groups import ProcessGroups

from slime_core.errors import ConfigError


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_is_a_world_of_its_own() -> None:
    groups = ProcessGroups(Layout(), "cpu")
    try:
        assert (groups.rank, groups.world_size, groups.data_rank, groups.data_size) == (0, 1, 0, 1)
        assert groups.is_first_stage
        assert groups.is_last_stage
        x = torch.arange(3.0)
        total = groups.all_reduce(x)
        assert torch.equal(total, x)
        assert total.data_ptr() != x.data_ptr()
        assert groups.broadcast(b"abc") == groups.broadcast_over_pipeline(b"abc") == b"abc"
        assert groups.broadcast(b"") == b""
        found = groups.tensors_over_pipeline({"x": x.requires_grad_()})
        assert torch.equal(found["x"], x)
        assert not found["x"].requires_grad
        groups.barrier()
    finally:
        groups.close()
    assert not torch.distributed.is_initialized()


def test_actor_and_critic_share_the_groups_and_the_last_one_closes_them() -> None:
    actor = ProcessGroups(Layout(), "cpu")
    critic = ProcessGroups(Layout(), "cpu")
    assert actor.tensor_group is critic.tensor_group
    actor.close()
    actor.close()
    critic.barrier()
    critic.close()
    assert not torch.distributed.is_initialized()
    again = ProcessGroups(Layout(), "cpu")
    again.barrier()
    again.close()


def test_a_world_that_others_joined_is_left_as_it_was() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        groups = ProcessGroups(Layout(), "cpu")
        groups.close()
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_several_processes_need_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR.*torchrun"):
        ProcessGroups(Layout(), "cpu")


def test_actor_and_critic_have_one_layout() -> None:
    actor = ProcessGroups(Layout(), "cpu")
    with pytest.raises(ConfigError, match="share one layout"):
        ProcessGroups(Layout(context=2), "cpu")
    actor.close()
    assert not torch.distributed.is_initialized()
