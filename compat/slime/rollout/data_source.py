"""`slime.rollout.data_source`: the classes that users' data sources derive from, over slime_core's `DatasetSource`.

Here the buffer is part of the checkpoint, so groups of a partial rollout survive a restart. If a subclass overrides
`save` or `load`, its own methods are called, and nothing is stored inside the checkpoint.
"""

from __future__ import annotations

import abc
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime import _missing
from slime._settings import settings_of
from slime_core.data.buffer import BufferBase
from slime_core.errors import CheckpointError, ConfigError, RolloutError, rollout_name
from slime_core.files import replace_file
from slime_core.sample import Group

BufferFilterFn = Callable[[Any, int | None, list[Group], int], list[Group]]


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Remove and return the `num_samples` oldest groups of `buffer`, or all if there are fewer."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


class DataSource(abc.ABC):
    """The interface of data sources in slime_core. Constructed as `cls(args)`."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """Return `num_samples` groups of `args.n_samples_per_prompt` samples."""

    @abc.abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back; they are drawn first."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Save the state at the end of a rollout."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Load the state that `save` wrote."""

    def __len__(self) -> int:
        """Return the number of prompts in one epoch."""
        return 0


class RolloutDataSource(DataSource):
    """The rows of `--prompt-data` in the order of the epoch; groups cannot be returned to it.

    It has the attributes of THUDM/slime's class: `epoch_id`, `sample_offset`, `sample_group_index`, `sample_index`,
    `metadata` and `dataset`.
    """

    def __init__(self, args: Any) -> None:
        from slime_core.data.prompts import DatasetSource

        self.args = args
        self.metadata: dict[str, Any] = {}
        self._source = DatasetSource(settings_of(args), buffer_filter=pop_first)
        self._dataset: Any = None

    # -- THUDM/slime's attributes --------------------------------------------------------------------

    @property
    def epoch_id(self) -> int:
        """Number of completed epochs."""
        return self._source._epoch

    @epoch_id.setter
    def epoch_id(self, value: int) -> None:
        self._source._epoch = value

    @property
    def sample_offset(self) -> int:
        """Number of rows drawn in the epoch."""
        return self._source._offset

    @sample_offset.setter
    def sample_offset(self, value: int) -> None:
        self._source._offset = value

    @property
    def sample_group_index(self) -> int:
        """`group_index` of the next group."""
        return self._source._next_group

    @sample_group_index.setter
    def sample_group_index(self, value: int) -> None:
        self._source._next_group = value

    @property
    def sample_index(self) -> int:
        """`index` of the next sample."""
        return self._source._next_sample

    @sample_index.setter
    def sample_index(self, value: int) -> None:
        self._source._next_sample = value

    @property
    def dataset(self) -> Any:
        """All rows as samples (`slime.utils.data.Dataset`), read on first use; None without `--prompt-data`.

        It is a copy: changes do not affect the drawn prompts.
        """
        args = self.args
        if self._dataset is None and self._source.rows is not None:
            from slime_data.images import load_processor

            from slime.utils.data import Dataset

            self._dataset = Dataset(
                args.prompt_data,
                self.tokenizer,
                load_processor(args.hf_checkpoint) if args.multimodal_keys else None,
                multimodal_keys=args.multimodal_keys,
                max_length=args.rollout_max_prompt_len,
                prompt_key=args.input_key or "input",
                label_key=args.label_key,
                tool_key=args.tool_key,
                metadata_key=args.metadata_key,
                seed=args.rollout_seed,
                apply_chat_template=args.apply_chat_template,
                apply_chat_template_kwargs=args.apply_chat_template_kwargs,
            )
        return self._dataset

    @property
    def tokenizer(self) -> Any:
        """The run's tokenizer."""
        return self._source.tokenizer

    @property
    def rows(self) -> Any:
        """The rows of the file, which slime_core checks before a run starts."""
        return self._source.rows

    def __len__(self) -> int:
        return len(self._source)

    # -- drawing -------------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return the next prompts, continuing into later epochs as needed. Raises DataError for an unusable row."""
        return self._source.get_samples(num_samples)

    def add_samples(self, samples: list[Group]) -> None:
        """Raise RolloutError: this source has no buffer for returned groups."""
        raise RolloutError(
            f"{type(self).__name__} takes no groups back; use RolloutDataSourceWithBuffer, or define add_samples"
        )

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """Do nothing; slime_core calls this before a rollout draws groups."""

    # -- storing -------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Called for missing attributes: slime_core stores a source with these two methods inside its checkpoint.
        if name in ("state_dict", "load_state_dict") and not self._stores_itself():
            return getattr(self, f"_{name}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _stores_itself(self) -> bool:
        own = (RolloutDataSource, RolloutDataSourceWithBuffer)
        return any(getattr(type(self), name) not in [getattr(base, name) for base in own] for name in ("save", "load"))

    def _state_dict(self) -> dict[str, Any]:
        return {"source": self._source.state_dict(), "metadata": self.metadata}

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "source" not in state:
            raise CheckpointError(
                f"the checkpoint's data source is another one than {type(self).__name__} (--data-source-path)"
            )
        self._source.load_state_dict(state["source"])
        self.metadata = dict(state["metadata"])

    def save(self, rollout_id: int) -> None:
        """Write the state below `args.save`, as JSON. Called by subclasses only; see the module's docstring."""
        path = self._path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(self._state_dict()).encode())

    def load(self, rollout_id: int | None = None) -> None:
        """Load the state that `save` wrote, from below `args.load`; do nothing without it. Raises CheckpointError."""
        if not getattr(self.args, "load", None) or rollout_id is None:
            return
        path = self._path(self.args.load, rollout_id)
        if not path.is_file():
            raise CheckpointError(f"{path}: no data source state of {rollout_name(rollout_id)}")
        self._load_state_dict(json.loads(path.read_text(encoding="utf-8")))

    @staticmethod
    def _path(directory: str | Path, rollout_id: int) -> Path:
        return Path(directory) / "rollout" / f"slime_data_source_{rollout_id}.json"


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A source whose returned groups wait in the list `buffer` and are drawn first, chosen by `--buffer-filter-path`.

    Raises:
        ConfigError: `--buffer-filter-path` names a buffer class, which has its own storage.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[Group] = []
        self.buffer_filter: BufferFilterFn = pop_first
        self._rollout_id: int | None = None
        spec = getattr(args, "buffer_filter_path", None)
        if spec:
            from slime_core.plugins.resolve import resolve

            found = resolve("buffers", spec, origin="--buffer-filter-path").obj
            if inspect.isclass(found):
                raise ConfigError(
                    f"--buffer-filter-path {spec!r} is a buffer class; {type(self).__name__} keeps its groups in a list"
                    " and takes a function. Leave out --data-source-path to use it with slime's own data source"
                )
            self.buffer_filter = found

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """Store the rollout number for the filter."""
        self._rollout_id = rollout_id

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return `num_samples` groups, groups of the buffer first."""
        samples = self._get_samples_from_buffer(num_samples)
        missing = num_samples - len(samples)
        return samples + super().get_samples(missing) if missing else samples

    def _get_samples_from_buffer(self, num_samples: int) -> list[Group]:
        if not self.buffer or not num_samples:
            return []
        taken = self.buffer_filter(self.args, self._rollout_id, self.buffer, num_samples)
        if not isinstance(taken, list) or len(taken) > num_samples:
            size = f" of {len(taken)}" if isinstance(taken, list) else ""
            raise RolloutError(
                f"--buffer-filter-path returned a {type(taken).__name__}{size}; expected a list of at most"
                f" {num_samples} groups"
            )
        left = {id(group) for group in self.buffer}
        if any(id(group) in left for group in taken):
            raise RolloutError("--buffer-filter-path returned a group without removing it from the buffer")
        return taken

    def add_samples(self, samples: list[Group]) -> None:
        """Append groups to the buffer.

        Raises:
            RolloutError: An unfinished group does not have `args.n_samples_per_prompt` samples; no group is added.
        """
        from slime_core.data.buffer import is_finished

        for group in samples:
            if not isinstance(group, list) or (len(group) != self.args.n_samples_per_prompt and not is_finished(group)):
                size = f"{len(group)} samples" if isinstance(group, list) else f"type {type(group).__name__}"
                raise RolloutError(
                    f"add_samples got a group of {size}; --n-samples-per-prompt is {self.args.n_samples_per_prompt}"
                )
        self.buffer.extend(samples)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to `metadata`, which is stored with the state."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata, with all updates of `update_metadata`."""
        return self.metadata

    def get_buffer_length(self) -> int:
        """Return the number of waiting groups."""
        return len(self.buffer)

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of the buffer; slime_core calls this after a rollout."""
        return {"rollout/buffer/waiting_groups": float(len(self.buffer))}

    def _state_dict(self) -> dict[str, Any]:
        return {**super()._state_dict(), "buffer": BufferBase.pack(self.buffer)}

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        super()._load_state_dict(state)
        self.buffer = BufferBase.unpack(state.get("buffer") or [])


__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]
__getattr__ = _missing.names(__name__)
