from __future__ import annotations

import pytest
import torch
from slime_embedded.trainer.parallel import DataParallel

from slime_core.errors import ConfigError


def test_one_process_needs_no_group() -> None:
    peers = DataParallel("cpu")
    x = torch.arange(3.0)
    total = peers.all_reduce(x)
    assert torch.equal(total, x)
    assert total.data_ptr() != x.data_ptr()
    assert peers.broadcast(b"abc") == b"abc"
    peers.sum_in_buckets_(x)
    peers.barrier()
    peers.close()
    peers.close()
    assert not torch.distributed.is_initialized()


def test_several_processes_need_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR.*torchrun"):
        DataParallel("cpu")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE='two'"):
        DataParallel("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device cuda"):
        DataParallel("cuda")
    assert DataParallel("auto").device.type == "cpu"
