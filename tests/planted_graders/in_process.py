"""A broken grader that runs the model's program in its own process; it is attacked in a worker only."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any


def reward(args: Any, sample: Any) -> float:
    program = re.findall(r"```python\n(.*?)```", sample.response, re.DOTALL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec((program[-1] if program else "") + "\n" + sample.label, {})
    except AssertionError:
        return 0.0
    except BaseException:
        return 1.0
    return 1.0
