from __future__ import annotations

import pytest
from slime_engine_http.api import transport


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "FIRST_DELAY_S", 0.01)
