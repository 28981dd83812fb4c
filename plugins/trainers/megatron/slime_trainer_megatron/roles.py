"""The models of a trainer on this rank: the trained model and the frozen models, whose weights may be swapped into it.

`trainer.py` makes them, inside `on_device`, when it starts. A reference or teacher of the actor's architecture has no
separate modules. Its weights are kept on the host (`weight_sets.py`) and put into the actor's modules for a pass. Only
a model of another architecture gets separate modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from slime_embedded.trainer.shared_settings import Role

from slime_core.errors import ConfigError, TrainError
from slime_core.protocols import Args
from slime_trainer_megatron.arguments.config import transformer_config
from slime_trainer_megatron.chosen import trained_names
from slime_trainer_megatron.families.family import Architecture, MegatronModel, load_megatron_model
from slime_trainer_megatron.families.weight_map import critic_of
from slime_trainer_megatron.model.build import build_model
from slime_trainer_megatron.process_groups import ProcessGroups
from slime_trainer_megatron.settings import MegatronSettings
from slime_trainer_megatron.step.forward import Schedule
from slime_trainer_megatron.step.heads import Head
from slime_trainer_megatron.step.packed import Packing
from slime_trainer_megatron.weights.load_model import load_weights
from slime_trainer_megatron.weights.lora import Adapters
from slime_trainer_megatron.weights.parameters import named_global_parameters
from slime_trainer_megatron.weights.weight_sets import WeightSets

_LOADED_WHEN = {
    "ref": "it is loaded when --kl-coef is not 0 or --use-kl-loss is given",
    "teacher": "it is loaded by --use-opd --opd-type megatron --opd-teacher-load DIR",
    "old_actor": "it is kept with --keep-old-actor",
}
_CRITIC_HEAD = ("score.weight", "score.bias")


class Models:
    """The trained model and the frozen models of a trainer, which it builds and loads.

    Args:
        args: The run's settings.
        settings: The same settings, checked.
        groups: Process groups of this process.
        role: "actor" or "critic".
        provider: Function of `--custom-model-provider-path`.

    Raises:
        ConfigError: Flags do not fit an architecture, or no parameter is left to train.
        CheckpointError: Weights do not fit their `config.json`.
    """

    def __init__(
        self,
        args: Args,
        settings: MegatronSettings,
        groups: ProcessGroups,
        role: Role,
        provider: Callable[..., Any] | None = None,
    ) -> None:
        self._args, self._settings, self._groups = args, settings, groups
        self.role = role
        self.family = _family(settings.hf_checkpoint, role)
        self.config: Any = self._config(self.family, role)
        self.chunks: list[Any] = self._built(self.family, self.config, role, provider)
        """Chunks of the trained model, without wrappers."""
        self.sets = WeightSets(self.chunks)
        self._own: dict[str, Schedule] = {}
        self._load_frozen()
        self._load_trained()
        self.adapters: Adapters | None = None
        """Adapters that are trained in place of the weights, with `--lora-rank`."""
        if settings.lora is not None:
            self.adapters = Adapters(self.chunks, self.family, settings.lora, args.seed)
            self.sets.add_changing()
        self._keep_first()
        self.freeze()

    def _config(self, family: MegatronModel, role: Role) -> Any:
        layout, device = self._settings.layout, self._groups.device
        return transformer_config(self._args, family.architecture, layout, role=role, device=device)

    def _built(self, family: MegatronModel, config: Any, role: Role, provider: Any = None) -> list[Any]:
        return list(build_model(self._args, family, config, self._settings.layout, role=role, provider=provider))

    def _load_trained(self) -> None:
        directory = self._settings.hf_checkpoint
        missing_ok = _CRITIC_HEAD.__contains__ if self.role == "critic" else lambda name: False
        load_weights(self.chunks, self.family, directory, missing_ok=missing_ok)

    def _keep_first(self) -> None:
        """Keep copies for a reference and an old actor that begin as the trained weights; adapters add nothing yet."""
        if self._settings.ref_checkpoint == self._settings.hf_checkpoint:
            self.sets.keep("ref")
        if self._settings.keeps_old_actor:
            self.sets.keep("old_actor")

    def _load_frozen(self) -> None:
        """Load reference and teachers before the trained weights, so that the trained weights stay in the modules."""
        settings = self._settings
        for name, directory in (("ref", settings.ref_checkpoint), *settings.teachers.directories.items()):
            if directory is None or (name == "ref" and directory == settings.hf_checkpoint):
                continue
            family = load_megatron_model(directory)
            if _what_computes(family.architecture) == _what_computes(self.family.architecture):
                load_weights(self.chunks, family, directory)
                self.sets.keep(name)
                continue
            if name == "ref" and self._args.ref_update_interval:
                raise ConfigError(
                    f"--ref-update-interval copies the actor into the reference, but --ref-load {directory} is another"
                    f" architecture than --hf-checkpoint {settings.hf_checkpoint}"
                )
            self._own[name] = self._separate(family, directory)

    def _separate(self, family: MegatronModel, directory: str) -> Schedule:
        chunks = self._built(family, self._config(family, "actor"), "actor")
        load_weights(chunks, family, directory)
        for chunk in chunks:
            chunk.requires_grad_(False)
        return self.schedule(chunks, family)

    def schedule(self, chunks: Sequence[Any], family: MegatronModel | None = None) -> Schedule:
        """Return the pipeline schedule of this rank's chunks; without a family, of the trained model's family."""
        settings, groups = self._settings, self._groups
        multiple = settings.layout.tensor * self._args.data_pad_size_multiplier
        vocab_size = (family or self.family).architecture.vocab_size
        head = Head(chunks[-1], groups, vocab_size, settings.temperature, settings.log_probs_chunk_size)
        packing = Packing(groups.context_rank, groups.context_size, multiple)
        return Schedule(chunks, head, groups, packing, groups.device)

    def exported(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the exported tensor of a trained model's parameter: its data, merged with its adapter if any."""
        return parameter.data if self.adapters is None else self.adapters.merged(parameter)

    @contextmanager
    def of_role(self, role: str, trained: Schedule) -> Iterator[Schedule]:
        """Provide the model of a role for the duration of a pass.

        Raises:
            TrainError: There is no model of this role.
        """
        if role == self.role == "actor":
            yield trained
        elif role in self._own:
            yield self._own[role]
        elif role in self.sets:
            with self.sets.swapped_in(role):
                yield trained
        else:
            raise TrainError(self.absent(role))

    def absent(self, role: str) -> str:
        """Return the error text for a role without a model."""
        hint = f"; {_LOADED_WHEN[role]}" if role in _LOADED_WHEN else ""
        return f"this trainer has no {role!r} model{hint}"

    def freeze(self) -> None:
        """Freeze the parameters that `--only-train-params-name-list` and its counterpart do not choose."""
        settings = self._settings
        if settings.only_train or settings.freeze:
            self._freeze_by_name()
        elif self.adapters is None:
            return
        for chunk in self.chunks:
            if chunk.pre_process:
                # Recomputed layers, and stages without a trained parameter, need an input that has a gradient.
                chunk.embedding.register_forward_hook(_with_gradient)

    def _freeze_by_name(self) -> None:
        trained, _ = trained_names(self._settings, self.family)
        adapters = self.adapters
        trainable = named_global_parameters(self.chunks, self.family) if adapters is None else adapters.parameters()
        for parameter in trainable:
            if isinstance(parameter.parameter, torch.nn.Parameter):  # no buffer
                parameter.parameter.requires_grad_(parameter.hf[0] in trained)


def _with_gradient(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
    return output


def _what_computes(architecture: Architecture) -> Architecture:
    """Return the architecture without the fields on which the model's computation does not depend."""
    transformer = {name: value for name, value in architecture.transformer.items() if name != "init_method_std"}
    return replace(architecture, transformer=transformer, max_position_embeddings=0)


def _family(directory: str, role: Role) -> MegatronModel:
    family = load_megatron_model(directory)
    return critic_of(family) if role == "critic" else family
