"""The contract of model families: the architecture read from `config.json` gives the same results as transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from slime_core.errors import ConfigError
from slime_testing_contracts.base import Contract

if TYPE_CHECKING:
    from slime_core.models.config import ModelConfig

TINY: Mapping[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


class ModelContract(Contract):
    """HF names and shapes, the logits of transformers, and weights that are saved and loaded bit for bit."""

    kind = "models"
    config: ClassVar[Mapping[str, Any]] = {}
    """Entries of `config.json` beyond a tiny dense decoder's."""

    def _hf_config(self) -> Any:
        from transformers import AutoConfig

        # transformers writes into the dictionaries that it is given
        return AutoConfig.for_model(self.component.rpartition(":")[2], **deepcopy({**TINY, **self.config}))

    @property
    def hf(self) -> dict[str, Any]:
        """`config.json` of a tiny model of the family, with all of HF's defaults."""
        config = self._hf_config()
        return {**config.to_dict(), "model_type": config.model_type}

    @property
    def model_config(self) -> ModelConfig:
        """The plugin's `ModelConfig` for `hf`."""
        config: ModelConfig = self.resolved.obj(self.hf)
        return config

    def test_reads_the_sizes(self) -> None:
        """The sizes equal those in `config.json`."""
        hf, config = self.hf, self.model_config
        assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (
            hf["vocab_size"],
            hf["hidden_size"],
            hf["intermediate_size"],
        )
        assert (config.num_layers, config.num_heads) == (hf["num_hidden_layers"], hf["num_attention_heads"])

    @pytest.mark.parametrize("missing", ["vocab_size", "hidden_size", "num_hidden_layers"])
    def test_a_missing_size_is_named(self, missing: str) -> None:
        """A missing size raises ConfigError, not KeyError."""
        hf = {key: value for key, value in self.hf.items() if key != missing}
        with pytest.raises(ConfigError, match=missing):
            self.resolved.obj(hf)

    def test_logits_and_weights_are_transformers(self) -> None:
        """Parameters have the names of saved files, logits are within 1e-4, and weights pass through unchanged."""
        import torch
        from slime_embedded.models.decoder import Decoder
        from transformers import AutoModelForCausalLM

        from slime_core.models.hf_io import read_weights

        torch.manual_seed(0)
        build: Any = AutoModelForCausalLM.from_config
        reference = build(self._hf_config(), attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in reference.parameters():  # biases and norms start at constants that hide mistakes
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        with tempfile.TemporaryDirectory() as directory:  # names are those of the files
            reference.save_pretrained(directory)
            weights = dict(read_weights(directory))
        decoder = Decoder.from_weights(self.model_config, weights.items())
        ours = dict(decoder.named_parameters())
        assert set(ours) == set(weights)
        assert all(torch.equal(ours[name], weights[name]) for name in weights)
        ids = torch.randint(0, TINY["vocab_size"], (1, 17))
        with torch.no_grad():
            expected = reference(ids).logits[0]
            found = decoder(ids[0], [17])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
