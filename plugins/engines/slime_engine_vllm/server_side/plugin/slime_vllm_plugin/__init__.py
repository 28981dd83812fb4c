"""slime's part of a vLLM server: a weight transfer backend, and adapters without files.

vLLM calls `register` in each process of the server.
"""

from __future__ import annotations

import os

_PLAIN_LINEAR = "PLAIN_LINEAR_ON_CPU"


def register() -> None:
    """Add the backend "slime", which `--weight-transfer-config '{"backend": "slime"}'` selects."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "slime" not in WeightTransferEngineFactory._registry:  # vLLM may load plugins more than once
        WeightTransferEngineFactory.register_engine("slime", "slime_vllm_plugin.transfer", "SlimeTransfer")
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1":
            from slime_vllm_plugin import adapters

            adapters.register()
    if os.environ.get(_PLAIN_LINEAR) == "1":
        # oneDNN computes from a packed copy and empties the parameter, so that no checksum tells what is served.
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
