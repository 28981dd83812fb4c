"""Loading and export over several ranks: bitwise in every layout, in one order, a bucket at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from slime_trainer_megatron.families import places
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.process_groups import ProcessGroups
from slime_trainer_megatron.weights import weights_out
from slime_trainer_megatron.weights.parameters import named_global_parameters
from slime_trainer_megatron.weights.weights_in import load_hf
from slime_trainer_megatron.weights.weights_out import hf_weights
from torch.utils._python_dispatch import TorchDispatchMode

from slime_core.models.hf_io import read_weights
from tests.backends.megatron.ranks import RankError, RankPool
from tests.megatron_models import chunks_of, family, save_tiny

pytestmark = pytest.mark.backends

HERE = "tests.backends.megatron.test_weights"
BUCKET = 20_000


class LiveBytes(TorchDispatchMode):
    """Counts the storages made since it was entered that are still there; `peak` is the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._note(
                    tensor.untyped_storage(), {id(a.untyped_storage()) for a in args if isinstance(a, torch.Tensor)}
                )
        return result

    def _note(self, storage: Any, of_arguments: set[int]) -> None:
        if id(storage) in self.live or id(storage) in of_arguments:
            return
        self.live[id(storage)] = storage.nbytes()
        weakref.finalize(storage, self.live.pop, id(storage), None)
        self.peak = max(self.peak, sum(self.live.values()))


def there_and_back(directory: str, layout: dict[str, Any], role: str = "actor", near: bool = True) -> dict[str, Any]:
    """What a rank got when it loaded the checkpoint and exported it, and the peak of memory in between."""
    with nullcontext() if near else patch.object(weights_out, "readable_ranks", dict):
        return _there_and_back(directory, layout, role)


def _there_and_back(directory: str, layout: dict[str, Any], role: str) -> dict[str, Any]:
    ProcessGroups(Layout(**layout), "cpu")
    model = family(Path(directory), role)
    chunks = chunks_of(model, role=role)
    left = load_hf(chunks, model, directory, missing_ok=lambda name: name.startswith("score."))
    files = dict(read_weights(directory))
    sends, send = [], dist.send
    dist.send = lambda *args, **kwargs: sends.append(1) or send(*args, **kwargs)
    names, wrong = [], []
    try:
        with LiveBytes() as memory:
            for name, tensor in hf_weights(chunks, model, bucket_bytes=BUCKET):
                names.append(name)
                if name in files and not torch.equal(tensor, files[name]):
                    wrong.append(name)
                del tensor
    finally:
        dist.send = send
    doubled = []
    for name, tensor in hf_weights(chunks, model, what=lambda p: p.data.bfloat16() * 2):
        if name in files and not torch.equal(tensor, files[name].bfloat16() * 2):
            doubled.append(name)
    largest = max(named.parameter.nbytes for named in named_global_parameters(chunks, model))
    own = sum(named.parameter.nbytes for named in named_global_parameters(chunks, model))
    return {
        "left": left, "names": names, "wrong": wrong + doubled, "peak": memory.peak, "sends": len(sends), "own": own,
        "largest": largest,
    }  # fmt: skip


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "vpp2": (2, {"pipeline": 2, "virtual": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context": 2}),
    "tp4-2-groups": (4, {"tensor": 4}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "tp2-dp2": (4, {"tensor": 2}),
    "pp2-vpp2-dp2": (4, {"pipeline": 2, "virtual": 2}),
    "ep2": (2, {"expert": 2}),
    "ep2-tp2-etp1": (2, {"tensor": 2, "expert": 2, "expert_tensor": 1, "sequence_parallel": True}),
    "ep2-tp2-etp2": (4, {"tensor": 2, "expert": 2, "sequence_parallel": True}),
    "ep2-pp2": (4, {"pipeline": 2, "expert": 2}),
    "ep2-tp2-etp1-pp2": (
        4,
        {"tensor": 2, "expert": 2, "expert_tensor": 1, "pipeline": 2, "sequence_parallel": True},
    ),
}
CASES = [
    *((variant, layout) for layout in ("tp2", "pp2", "vpp2") for variant in ("llama-biases", "qwen2-tied", "qwen3")),
    *(("qwen3-tied", layout) for layout in ("tp2-pp2", "pp2-vpp2-dp2")),
    *(("qwen2", layout) for layout in ("dp2", "cp2", "tp4-2-groups", "tp2-pp2", "tp2-dp2")),
    *(("qwen3-moe", layout) for layout in LAYOUTS if layout != "tp4-2-groups"),
    *(("qwen3-moe-mixed", layout) for layout in ("vpp2", "ep2-tp2-etp2", "ep2-pp2")),
]


@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_there_and_back_is_bitwise(ranks: Callable[[int], RankPool], tmp_path: Path, variant: str, layout: str) -> None:
    save_tiny(tmp_path, variant, shard_size="50KB")
    size, settings = LAYOUTS[layout]
    first, *others = ranks(size).run(f"{HERE}:there_and_back", directory=str(tmp_path), layout=settings)
    assert first["wrong"] == []
    assert first["names"] == [name for place in places(family(tmp_path)) for name in place.hf]
    assert set(first["names"]) == {name for name, _ in read_weights(tmp_path)}
    for other in others:
        assert other["names"] == []
    total = sum(tensor.nbytes for _, tensor in read_weights(tmp_path))
    assert first["peak"] < 3 * BUCKET < total / 2
    # Senders hold one bucket's parts, and send them (all are small here) as one message.
    assert max(other["peak"] for other in others) <= 2 * BUCKET
    assert max(other["sends"] for other in others) <= 2 * total / BUCKET


def test_parts_of_ranks_that_cannot_be_read_are_sent(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    size, settings = LAYOUTS["tp2-pp2"]
    read = ranks(size).run(f"{HERE}:there_and_back", directory=str(tmp_path), layout=settings)
    sent = ranks(size).run(f"{HERE}:there_and_back", directory=str(tmp_path), layout=settings, near=False)
    assert sent[0]["names"] == read[0]["names"]
    assert sent[0]["wrong"] == []
    for before, after in zip(read[1:], sent[1:], strict=True):
        assert before["peak"] < after["peak"], "what is read is not copied first"


def test_replicas_do_not_send(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3-moe")
    for layout, senders in (("dp2", []), ("cp2", []), ("tp2-dp2", [1]), ("ep2", [1]), ("ep2-pp2", [1, 2, 3])):
        size, settings = LAYOUTS[layout]
        found = ranks(size).run(f"{HERE}:there_and_back", directory=str(tmp_path), layout=settings)
        assert [rank for rank, one in enumerate(found) if rank and one["sends"]] == senders


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2-pp2"])
def test_a_critic_exports_its_head_once(ranks: Callable[[int], RankPool], tmp_path: Path, layout: str) -> None:
    save_tiny(tmp_path, "qwen2-tied")
    size, settings = LAYOUTS[layout]
    found = ranks(size).run(f"{HERE}:there_and_back", directory=str(tmp_path), layout=settings, role="critic")
    assert found[0]["names"][-2:] == ["score.weight", "score.bias"]
    assert found[0]["wrong"] == []
    assert found[-1]["left"] == ["score.weight", "score.bias"]


def refused(directory: str, layout: dict[str, Any]) -> str:
    ProcessGroups(Layout(**layout), "cpu")
    model = family(Path(directory))
    chunks = chunks_of(model)
    try:
        load_hf(chunks, model, directory)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_every_rank_says_what_one_misses(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    from slime_core.models.hf_io import write_weights

    save_tiny(tmp_path, "qwen3")
    files = dict(read_weights(tmp_path))
    del files["model.layers.3.mlp.up_proj.weight"]  # of the second stage
    write_weights(tmp_path, files.items())
    said = ranks(2).run(f"{HERE}:refused", directory=str(tmp_path), layout=LAYOUTS["pp2"][1])
    assert len(set(said)) == 1
    assert "CheckpointError" in said[0]
    assert "model.layers.3.mlp.up_proj.weight: missing" in said[0]


def waits_for_rank_1(directory: str, layout: dict[str, Any]) -> None:
    ProcessGroups(Layout(**layout), "cpu", timeout_minutes=0.15)
    model = family(Path(directory))
    chunks = chunks_of(model)
    load_hf(chunks, model, directory)
    weights = hf_weights(chunks, model, bucket_bytes=BUCKET)
    if dist.get_rank():
        threading.Event().wait()
    list(weights)


def test_nobody_waits_for_ever_for_a_rank_that_does_not_take_part(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    save_tiny(tmp_path, "qwen3")
    with pytest.raises(RankError, match=r"on rank 0 of 2:(?s:.*)[Tt]imed out"):
        ranks(2).run(f"{HERE}:waits_for_rank_1", directory=str(tmp_path), layout=LAYOUTS["tp2"][1])
