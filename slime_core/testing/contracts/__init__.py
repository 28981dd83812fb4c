"""What every component of a kind must do, as test classes; see `slime_core.testing`.

Importing this package imports only pytest, and happens before its modules are: it has their asserts rewritten, so
that a failure shows values.
"""

import pytest

pytest.register_assert_rewrite(
    *(f"{__name__}.{suite}" for suite in ("base", "buffer", "estimator", "filter", "generator", "model", "reward"))
)
