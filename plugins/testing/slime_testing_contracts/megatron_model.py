"""The contract of model families for Megatron-core: the map has every tensor of a saved model, and is lossless.

Only two tests need Megatron, for its fields and for logits; they are skipped without it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_testing_contracts.base import Contract
from slime_testing_contracts.model import TINY
from slime_testing_contracts.tiny import tiny_model
from slime_testing_contracts.trainer import SPLITS, TrainerContract, example_batch

if TYPE_CHECKING:
    import torch
    from slime_trainer_megatron.families import MegatronModel


class MegatronModelContract(Contract):
    """Tests that a family saves transformers' tensors, each in exactly one row, and that merges are bitwise exact."""

    kind = "megatron_models"
    config: ClassVar[Mapping[str, Any]] = {}
    """Entries of `config.json` beyond a tiny dense decoder's."""
    reference: ClassVar[str] = ""
    """The `model_type` of transformers that saves the same tensors, for a family that transformers lacks."""

    @property
    def model_type(self) -> str:
        """The `model_type` in transformers."""
        return self.reference or self.component.rpartition(":")[2]

    @property
    def entries(self) -> dict[str, Any]:
        """Entries of `config.json`; with latent attention, transformers' `head_dim` is the rotated part of a head."""
        rotated = {"head_dim": self.config["qk_rope_head_dim"]} if "qk_rope_head_dim" in self.config else {}
        # transformers writes into the dictionaries that it is given
        return deepcopy({**TINY, "initializer_range": 0.1, **rotated, **self.config})

    @property
    def hf(self) -> dict[str, Any]:
        """`config.json` of a tiny model of the family, all of HF's defaults filled in."""
        from transformers import AutoConfig

        config = AutoConfig.for_model(self.model_type, **self.entries)
        return {**config.to_dict(), "model_type": config.model_type}

    @property
    def megatron_model(self) -> MegatronModel:
        """The plugin's `MegatronModel` for `hf`."""
        model: MegatronModel = self.resolved.obj(self.hf)
        return model

    def saved(self, directory: str) -> Any:
        """Write a tiny transformers model with random weights to the directory; return the model."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(self.model_type, **self.entries)
        build: Any = AutoModelForCausalLM.from_config
        reference = build(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for tensor in reference.state_dict().values():
                if tensor.dim() == 1:  # norms and biases start at constants that hide mistakes
                    tensor.add_(torch.randn(tensor.shape) * 0.1)
        reference.save_pretrained(directory)
        return reference

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors in the files of `saved`."""
        from slime_core.models.hf_io import read_weights

        with tempfile.TemporaryDirectory() as directory:  # names are those of the files
            self.saved(directory)
            return dict(read_weights(directory))

    def test_reads_the_sizes(self) -> None:
        """The plugin reads the sizes in `config.json`."""
        hf, architecture = self.hf, self.megatron_model.architecture
        assert architecture.vocab_size == hf["vocab_size"]
        assert architecture.num_layers == hf["num_hidden_layers"]
        assert architecture.transformer["hidden_size"] == hf["hidden_size"]
        assert architecture.transformer["num_attention_heads"] == hf["num_attention_heads"]
        assert architecture.tie_word_embeddings == hf["tie_word_embeddings"]

    @pytest.mark.parametrize("missing", ["vocab_size", "hidden_size", "num_hidden_layers"])
    def test_a_missing_size_is_named(self, missing: str) -> None:
        """A missing size raises ConfigError, not KeyError."""
        hf = {key: value for key, value in self.hf.items() if key != missing}
        with pytest.raises(ConfigError, match=missing):
            self.resolved.obj(hf)

    def test_fields_are_megatrons(self) -> None:
        """`transformer` has only fields of `TransformerConfig`, and none of parallelism."""
        pytest.importorskip("megatron.core")
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.transformer.transformer_config import MLATransformerConfig

        fields = set(self.megatron_model.architecture.transformer)
        assert fields - set(MLATransformerConfig.__dataclass_fields__) == set()
        assert fields & set(ModelParallelConfig.__dataclass_fields__) == set()

    def test_the_map_has_every_tensor_of_the_files_once(self) -> None:
        """The map has each HF name exactly once and no unknown name; no Megatron parameter occurs twice."""
        import re

        from slime_trainer_megatron.families import places

        model = self.megatron_model
        mapped = [name for place in places(model) for name in place.hf]
        assert sorted(set(mapped)) == sorted(mapped)
        names = [place.megatron for place in places(model)]
        assert sorted(set(names)) == sorted(names)
        known = [re.compile(pattern) for pattern in (*model.carried, *model.ignored)]
        files = set(self.tensors())
        assert set(mapped) - files == set()
        assert [name for name in files - set(mapped) if not any(one.fullmatch(name) for one in known)] == []

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_merges_are_their_own_way_back(self, size: int) -> None:
        """HF -> parts -> HF is bitwise exact, parts have one shape, and reading slices equals reading whole tensors."""
        import torch
        from slime_trainer_megatron.families import places

        tensors = self.tensors()
        split = 0
        for place in places(self.megatron_model):
            row, whole = place.row, [tensors[name] for name in place.hf]
            ranks = 1 if row.split == "replicated" else size
            try:
                parts = [row.merge.to_megatron(whole, rank, ranks) for rank in range(ranks)]
            except ValueError:  # it does not divide; Megatron refuses such a size
                continue
            split += 1
            back = row.merge.to_hf(parts)
            assert [tensor.shape for tensor in back] == [tensor.shape for tensor in whole], place.megatron
            assert all(torch.equal(one, other) for one, other in zip(back, whole)), place.megatron
            assert len({part.shape for part in parts}) == 1, place.megatron
            axis = row.merge.read_axis(ranks)
            if axis is not None and not row.vocabulary:
                for rank, part in enumerate(parts):
                    cut = [tensor.chunk(ranks, axis)[rank] for tensor in whole]
                    assert torch.equal(row.merge.to_megatron(cut, 0, 1), part), place.megatron
        assert split > 1

    def test_logits_are_transformers(self) -> None:
        """Logits agree within 1e-4, in float32 and one process, with a padded vocabulary."""
        pytest.importorskip("megatron.core")
        import torch
        from slime_trainer_megatron.arguments.config import transformer_config
        from slime_trainer_megatron.cpu_mode import on_device
        from slime_trainer_megatron.families import critic_of
        from slime_trainer_megatron.layout import Layout
        from slime_trainer_megatron.model.build import build_model
        from slime_trainer_megatron.process_groups import ProcessGroups
        from slime_trainer_megatron.weights.weights_in import load_hf

        args, cpu, layout = self.settings, torch.device("cpu"), Layout()
        model = self.megatron_model
        groups = ProcessGroups(layout, "cpu")
        try:
            with tempfile.TemporaryDirectory() as directory:
                reference = self.saved(directory).float()
                config = transformer_config(args, model.architecture, layout, device=cpu)
                (chunk,) = build_model(args, model, config, layout)
                load_hf([chunk], model, directory)
                (critic,) = build_model(args, model, config, layout, role="critic")
                load_hf([critic], critic_of(model), directory, missing_ok=lambda name: name.startswith("score."))
            ids = torch.randint(0, TINY["vocab_size"], (1, 17))
            with torch.no_grad(), on_device(cpu):
                found = chunk.eval()(ids, torch.arange(17)[None], None)[..., : TINY["vocab_size"]]
                expected = reference(ids).logits
        finally:
            groups.close()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class MegatronModelProviderContract(Contract):
    """Contract: `(pre_process, post_process[, vp_stage])` -> a model with parameter names of the family's map."""

    kind = "megatron_model_providers"
    default_args: ClassVar[Any] = {**TrainerContract.default_args, "kl_coef": 0.1}

    @property
    def settings(self) -> Args:
        """Settings with a tiny random model and the function under test."""
        own = {"hf_checkpoint": str(tiny_model()), "custom_model_provider_path": self.component, **self.args}
        return super().settings.model_copy(update=own)

    def test_a_trainer_works_with_it(self) -> None:
        """Check that passes of actor and reference, and an optimizer step, give finite numbers."""
        from slime_trainer_megatron.trainer import MegatronTrainer

        trainer, batch = MegatronTrainer(self.settings), example_batch()
        try:
            for role in ("actor", "ref"):
                for part in trainer.log_probs(batch, SPLITS[1], role=role):
                    assert bool(part.isfinite().all()), f"log-probs of {role} are not finite"
            result = trainer.train_step(batch, SPLITS[1], lambda output: (-output.log_probs.sum() / 14, {}))
            assert result.metrics["skipped_steps"] == 0, "the gradients are not finite"
        finally:
            trainer.close()
