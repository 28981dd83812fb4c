from __future__ import annotations

import tests.light_megatron  # noqa: F401
