"""The teachers that a trainer holds: their directories, their vocabularies, and the teacher of each sample.

`--opd-teacher-load` names the teacher of most samples. A sample whose `train_metadata` has an entry "teacher" is scored
by another, which `plugins.on_policy_distillation.teachers` names; that reward routes the rows. Teachers with the same
directory are one model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from slime_core import PluginOptions, options
from slime_core.checkpoint.sources import find_source, required_source
from slime_core.data.tokenizer import has_tokenizer, load_tokenizer
from slime_core.errors import CheckpointError, ConfigError, TrainError
from slime_core.protocols import Args
from slime_core.sample import TrainBatch

TEACHER = "teacher"
"""Role of the teacher of samples that name none, and the entry of `train_metadata` that names another."""
_REWARD = "on_policy_distillation"


class _Teacher(BaseModel):
    path: str | None = None


class _Options(PluginOptions):
    teachers: dict[str, _Teacher] = Field(default_factory=dict)


def teacher_paths(args: Args) -> dict[str, str]:
    """Return the path that the user gave by name of each teacher in the trainer, "" for `--opd-teacher-load`."""
    if not (args.use_opd and args.opd_teacher_load):
        return {}
    named = options(args, _REWARD, _Options).teachers
    return {"": args.opd_teacher_load, **{name: each.path for name, each in named.items() if each.path is not None}}


@dataclass(frozen=True)
class Teachers:
    """The teachers of a trainer; one without a teacher has none."""

    directories: Mapping[str, str]
    """Role -> directory of the model."""
    roles: Mapping[str, str]
    """Name -> role, "" for samples that name no teacher."""

    @classmethod
    def of(cls, args: Args) -> Teachers:
        """Return the teachers of the actor's trainer."""
        roles: dict[str, str] = {}
        role_of: dict[str, str] = {}
        for name, path in teacher_paths(args).items():
            directory = _directory(args, name, path)
            role = role_of.setdefault(directory, f"{TEACHER}.{name}" if name else TEACHER)
            roles[name] = role
        return cls({role: directory for directory, role in role_of.items()}, roles)

    def by_role(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
        """Return the micro-batches of each teacher, in the same order of roles on every rank.

        Raises:
            TrainError: A sample names a teacher that the trainer does not have.
        """
        found: dict[str, list[list[int]]] = {role: [] for role in self.directories}
        for positions in micro_batches:
            parts: dict[str, list[int]] = {}
            for position in positions:
                parts.setdefault(self._role(batch, position), []).append(position)
            for role, part in parts.items():
                found[role].append(part)
        return found

    def _role(self, batch: TrainBatch, position: int) -> str:
        given = batch.train_metadata[position] if batch.train_metadata else None
        name = (given or {}).get(TEACHER) or ""
        if name not in self.roles:
            raise TrainError(
                f"sample {batch.sample_indices[position]}: its train_metadata names the teacher {name!r};"
                f" plugins.{_REWARD}.teachers has {', '.join(filter(None, self.roles)) or 'none'} in the trainer"
            )
        return self.roles[name]


def _directory(args: Args, name: str, path: str) -> str:
    source = find_source(path, None if name else args.opd_teacher_ckpt_step)
    return str(path if source is None else source.directory)


def check_teachers(settings: Any, *, reads_megatron: bool = False) -> None:
    """Raise ConfigError for a teacher without a model that the trainer reads, or with other tokens than the actor's."""
    args: Args = settings.args
    actor = Path(args.hf_checkpoint or "")
    for name, path in teacher_paths(args).items():
        cite = f"plugins.{_REWARD}.teachers.{name}.path {path!r}" if name else settings.cite("opd_teacher_load")
        step = None if name else args.opd_teacher_ckpt_step
        if args.prepare_path and find_source(path, step) is None:
            continue  # the recipe makes it
        try:
            source = required_source(path, step, cite=cite)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        if not (source.has_hf or reads_megatron):
            raise ConfigError(
                f"{cite}: is {source}, which {settings.cite('train_backend')} does not read; type slime convert"
                " megatron-to-hf"
            )
        if problem := _other_tokens(actor, source.directory):
            raise ConfigError(
                f"{cite}: its vocabulary is not that of {settings.cite('hf_checkpoint')}: {problem}; a teacher scores"
                " the actor's token ids, so name one with the actor's tokenizer"
            )


def _other_tokens(actor: Path, teacher: Path) -> str:
    """Return how the two tokenizers contradict each other; empty if they do not, or one of them is not there.

    One may have tokens that the other lacks, as models of one family have.
    """
    if actor == teacher or not (has_tokenizer(actor) and has_tokenizer(teacher)):
        return ""
    files = [directory / "tokenizer.json" for directory in (actor, teacher)]
    if all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes():
        return ""
    ours, theirs = ({i: token for token, i in load_tokenizer(d).get_vocab().items()} for d in (actor, teacher))
    different = [i for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i]]
    if not different:
        return ""
    first = different[0]
    return f"{len(different)} ids differ, such as {first}, which is {theirs[first]!r} there and {ours[first]!r} here"
