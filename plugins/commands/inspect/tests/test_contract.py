from __future__ import annotations

from slime_testing_contracts import CommandContract


class TestLedger(CommandContract):
    component = "ledger"


class TestRewards(CommandContract):
    component = "rewards"


class TestSamples(CommandContract):
    component = "samples"


class TestTokens(CommandContract):
    component = "tokens"


class TestWhy(CommandContract):
    component = "why"
