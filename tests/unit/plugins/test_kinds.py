from __future__ import annotations

import pytest

from slime_core.errors import PluginNotFoundError
from slime_core.plugins.kinds import kind_of


def test_an_unknown_kind_is_answered_with_a_suggestion() -> None:
    with pytest.raises(PluginNotFoundError, match=r"no plugin kind 'rewrads'. Did you mean 'rewards'\?"):
        kind_of("rewrads")
