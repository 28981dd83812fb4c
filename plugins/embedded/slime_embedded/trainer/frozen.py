"""The models of the embedded trainer that are not trained: reference, teachers, old actor.

`EmbeddedTrainer` builds, runs, saves and loads them. A checkpoint contains the reference and the teacher only if they
differ from their own checkpoints, and the old actor only if it differs from the actor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from slime_core.errors import ConfigError, TrainError
from slime_embedded.models.decoder import Decoder
from slime_embedded.trainer import state
from slime_embedded.trainer.settings import TrainerSettings
from slime_embedded.trainer.teachers import TEACHER

REFERENCE, OLD_ACTOR = "ref", "old_actor"
_LOADED_WHEN = {
    REFERENCE: "it is loaded when --kl-coef is not 0 or --use-kl-loss is given",
    TEACHER: "it is loaded by --use-opd --opd-type megatron --opd-teacher-load DIR",
    OLD_ACTOR: "it is kept with --keep-old-actor",
}

_FILES = {REFERENCE: state.REFERENCE, TEACHER: state.TEACHER}
"""Role of a model with a checkpoint of its own -> file with its weights, once they moved."""


class FrozenModels:
    """The frozen models by role; models that the run does not use are not loaded.

    Args:
        settings: Settings that select the models and their checkpoints.
        load: Function that loads a model, given role and directory.
    """

    def __init__(self, settings: TrainerSettings, load: Callable[[str, str], Decoder]) -> None:
        self._settings = settings
        directories = {REFERENCE: settings.ref_checkpoint, **settings.teachers.directories}
        if settings.keeps_old_actor:
            directories[OLD_ACTOR] = settings.hf_checkpoint
        self._models = {role: load(role, path).requires_grad_(False) for role, path in directories.items() if path}
        self._moved: set[str] = set()
        """Roles of the models that are no longer those of their checkpoints."""

    def __contains__(self, role: str) -> bool:
        return role in self._models

    def __getitem__(self, role: str) -> Decoder:
        """Return the model. Raises TrainError if the run has no such model."""
        if role not in self._models:
            hint = f"; {_LOADED_WHEN[role]}" if role in _LOADED_WHEN else ""
            raise TrainError(f"this trainer has no {role!r} model{hint}")
        return self._models[role]

    def copy(self, role: str, actor: Decoder) -> None:
        """Copy the actor's weights into the model. Raises TrainError as `[]` does."""
        self._copy(self[role], actor)
        self._moved.add(role)

    def follow(self, actor: Decoder, rate: float) -> None:
        """Move the weights of the teacher of `--opd-teacher-load` by a share of the way to the actor's.

        Raises TrainError if there is no teacher, or if it has other tensors than the actor.
        """
        teacher = self[TEACHER]
        if differ := self._differing(TEACHER, actor):
            directory = self._settings.teachers.directories[TEACHER]
            raise TrainError(
                f"--opd-teacher-load {directory}: a teacher that follows the actor has its tensors, and {len(differ)}"
                f" differ, such as {differ[0]}"
            )
        with torch.no_grad():
            for old, (_, new) in zip(teacher.parameters(), merged(actor, self._settings), strict=True):
                old.lerp_(new, rate)
        self._moved.add(TEACHER)

    def check_reference_fits(self, actor: Decoder) -> None:
        """Raise ConfigError unless the reference, if there is one, can take the actor's weights."""
        if REFERENCE in self and (differ := self._differing(REFERENCE, actor)):
            raise ConfigError(
                f"--ref-update-interval copies the actor into the reference, but --ref-load"
                f" {self._settings.ref_checkpoint} is another architecture: {len(differ)} tensors differ, such as"
                f" {differ[0]}"
            )

    def _differing(self, role: str, actor: Decoder) -> list[str]:
        """Return the names of tensors that one of the two lacks, or has in another shape."""
        ours, theirs = ({k: tuple(v.shape) for k, v in merged(m, self._settings)} for m in (actor, self[role]))
        return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))

    def save(self, directory: Path, actor: Decoder) -> None:
        """Write what `load` would not find otherwise."""
        for role in self._moved & _FILES.keys():
            state.save_frozen(directory, _FILES[role], tensors(self[role]))
        if OLD_ACTOR in self and not self._is_copy(self[OLD_ACTOR], actor):
            state.save_frozen(directory, state.OLD_ACTOR, tensors(self[OLD_ACTOR]))

    def load(self, directory: Path, actor: Decoder) -> None:
        """Load the models of `save`, after the actor is loaded. Raises CheckpointError if the files do not fit."""
        finetune = self._settings.finetune
        for role, name in _FILES.items():
            if role in self and not finetune and state.load_frozen(directory, name, tensors(self[role])):
                self._moved.add(role)
        if OLD_ACTOR in self:
            old = self[OLD_ACTOR]
            if finetune or not state.load_frozen(directory, state.OLD_ACTOR, tensors(old)):
                self._copy(old, actor)

    def _copy(self, target: Decoder, source: Decoder) -> None:
        with torch.no_grad():
            for old, (_, new) in zip(target.parameters(), merged(source, self._settings), strict=True):
                old.copy_(new)

    def _is_copy(self, one: Decoder, other: Decoder) -> bool:
        return all(torch.equal(a, b) for a, (_, b) in zip(one.parameters(), merged(other, self._settings), strict=True))


def tensors(model: Decoder) -> dict[str, torch.Tensor]:
    """Return the model's live parameters by HF name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def merged(model: Decoder, settings: TrainerSettings) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the parameters by HF name, with LoRA adapters, if any, merged into their weights one at a time."""
    if settings.lora is None:
        return tensors(model).items()
    from slime_embedded.models.lora_linear import merged_weights

    return merged_weights(model)
