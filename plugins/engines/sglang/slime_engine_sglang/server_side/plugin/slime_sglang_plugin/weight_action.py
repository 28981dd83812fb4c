"""POST /weights_checker {"action": "slime:read-back JSON"}: what of the trained tensors this server serves.

JSON: [[HF name, shape, dtype], ...]; the answer's `checksums`, one for each process of the server, are those of
`read_back`. A speculative draft model is not trained: where SGLang says that it asks for one, it gets no answer.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from typing import Any

from slime_sglang_plugin import insides
from slime_sglang_plugin.read_back import read_back

logger = logging.getLogger(__name__)

ACTION = "slime:read-back "


def apply() -> None:
    """Teach SGLang's checker the action; a version without a checker answers as it does."""
    try:
        checker = insides.weight_checker()
    except insides.Changed as error:
        logger.warning("slime: weights cannot be read back: %s", error)
        return
    handle = checker.handle

    @functools.wraps(handle)
    def handle_ours(self: Any, action: str, *args: Any, **kwargs: Any) -> Any:
        if not action.startswith(ACTION):
            return handle(self, action, *args, **kwargs)
        role = kwargs.get("role")
        return _answer(self, json.loads(action.removeprefix(ACTION)), role) if role in (None, insides.TARGET) else None

    checker.handle = handle_ours


def _answer(checker: Any, wanted: list[list[Any]], role: str | None) -> dict[str, Any]:
    found = read_back(insides.model_of(checker), wanted)
    digest = hashlib.blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=16)
    return {
        "checksums": found,
        "per_gpu_checksum": digest.hexdigest(),
        "parallelism_info": insides.place_of(checker, role),
    }
