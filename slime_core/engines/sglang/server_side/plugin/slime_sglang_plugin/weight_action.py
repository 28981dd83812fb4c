"""POST /weights_checker {"action": "slime:read-back JSON"}: what of the trained tensors this server serves.

JSON: [[HF name, shape, dtype], ...]; the answer's `checksums`, one for each process of the server, are those of
`read_back`. This module is all that knows SGLang.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from typing import Any

from slime_sglang_plugin.read_back import read_back

logger = logging.getLogger(__name__)

ACTION = "slime:read-back "


def apply() -> None:
    """Teach SGLang's checker the action; a version without a checker answers as it does."""
    try:
        from sglang.srt.utils.weight_checker import WeightChecker

        handle = WeightChecker.handle
    except (ImportError, AttributeError) as error:
        logger.warning("slime: weights cannot be read back from this version of SGLang: %s", error)
        return

    @functools.wraps(handle)
    def handle_ours(self: Any, action: str, *args: Any, **kwargs: Any) -> Any:
        if not action.startswith(ACTION):
            return handle(self, action, *args, **kwargs)
        return _answer(self, json.loads(action.removeprefix(ACTION)))

    WeightChecker.handle = handle_ours


def _answer(checker: Any, wanted: list[list[Any]]) -> dict[str, Any]:
    found = read_back(checker._get_model(), wanted)
    digest = hashlib.blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=16)
    return {
        "checksums": found,
        "per_gpu_checksum": digest.hexdigest(),
        "parallelism_info": checker._parallelism_info().model_dump(),
    }
