from __future__ import annotations

from slime_testing_contracts import MegatronModelContract


class TestMiniMaxM2(MegatronModelContract):
    component = "minimax_m2"
    config = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}
