"""The contract of engines kept by real SGLang servers: one asked directly, and two behind the router.

The embedded engine, and the engine `http` in front of it, keep the same suite in tests/contracts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from slime_testing_contracts import EngineContract
from slime_testing_contracts.engine_case import EngineCase

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]

LACKS = frozenset({
    # Without --sglang-enable-deterministic-inference, whose attention kernels want a GPU.
    "seeds",
    # SGLang loads what it knows and leaves the rest; --check-weight-update-equal finds out.
    "unknown_weights",
    # A server that took a part of an update never serves again; the supervisor, or the next run, starts it anew.
    "old_weights",
})  # fmt: skip


class Offered(EngineCase):
    """A base, since its tests come first, and the last ones of the contract leave no server running."""

    def test_which_transports_it_takes(self) -> None:
        """All of them: the tests of none were skipped."""

        async def use(engine: Any) -> tuple[str, ...]:
            return tuple(engine.weight_transports)

        assert self.run(use) == ("tensor", "distributed", "disk", "delta")


class Sglang(EngineContract, Offered):
    """What both have in common; its own tests are not collected under this name."""

    component = "sglang"
    lacks = LACKS
    late_versions = 1  # SGLang 0.5.20 paused in place names the token it had just sampled after the new weights
    deadline = 150.0
    start_deadline = 300.0
    servers: ClassVar[Mapping[str, Any]] = {
        "device": "cpu",
        "update_weight_transport": "delta",
        "router_health_check_interval_secs": 1,
    }

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _there_is_sglang(cls, sglang_python: Path) -> None:
        """Skips without it."""


class TestSglangDirect(Sglang):
    args: ClassVar[Mapping[str, Any]] = {**Sglang.servers, "engine_router": False, "rollout_num_gpus": 1}


class TestSglangBehindTheRouter(Sglang):
    """Its updates pause in place; those of the other end requests in flight, which the client continues."""

    args: ClassVar[Mapping[str, Any]] = {
        **Sglang.servers,
        "engine_router": True,
        "rollout_num_gpus": 2,
        "update_weight_pause_mode": "in_place",
    }
