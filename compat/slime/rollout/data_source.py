"""`slime.rollout.data_source`: the classes that users' data sources derive from, over slime_core's `DatasetSource`.

Here the buffer is part of the checkpoint, so groups of a partial rollout survive a restart. A subclass that overrides
`save` or `load` is taken at its word: its own methods are called then, and nothing is stored inside the checkpoint.
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
from slime_core.buffer import BufferBase
from slime_core.errors import CheckpointError, ConfigError, RolloutError
from slime_core.sample import Group

BufferFilterFn = Callable[[Any, int | None, list[Group], int], list[Group]]


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Take the `num_samples` oldest groups, or as many as there are, out of `buffer`."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


class DataSource(abc.ABC):
    """What slime_core asks of a data source. Constructed as `cls(args)`."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups of `args.n_samples_per_prompt` samples."""

    @abc.abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back, to be drawn again first."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Write the state of the end of a rollout."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Inverse of `save`."""

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return 0


class RolloutDataSource(DataSource):
    """`--prompt-data`, row by row in the order of the epoch; groups cannot be given back.

    The attributes of THUDM/slime's class are there: `epoch_id`, `sample_offset`, `sample_group_index`, `sample_index`,
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
        """Epochs completed."""
        return self._source._epoch

    @epoch_id.setter
    def epoch_id(self, value: int) -> None:
        self._source._epoch = value

    @property
    def sample_offset(self) -> int:
        """Rows of the epoch that have been drawn."""
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
        """All rows as samples (`slime.utils.data.Dataset`), read when first asked for; None without `--prompt-data`.

        A copy: changing it changes nothing that is drawn.
        """
        args = self.args
        if self._dataset is None and self._source.rows is not None:
            from slime.utils.data import Dataset
            from slime_core.data.images import load_processor

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
        """The run's."""
        return self._source.tokenizer

    @property
    def rows(self) -> Any:
        """The rows of the file, for slime_core to look through before a run starts."""
        return self._source.rows

    def __len__(self) -> int:
        return len(self._source)

    # -- drawing -------------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next prompts, going on into the next epochs as needed. Raises DataError for a row that cannot be used."""
        return self._source.get_samples(num_samples)

    def add_samples(self, samples: list[Group]) -> None:
        """Raises RolloutError: there is nowhere to put them."""
        raise RolloutError(
            f"{type(self).__name__} takes no groups back; use RolloutDataSourceWithBuffer, or define add_samples"
        )

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """Told by slime_core before a rollout draws."""

    # -- storing -------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Asked for what is nowhere else: slime_core stores a source with these two methods inside its checkpoint.
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
        """Write the state below `args.save`, as JSON. Called where a subclass calls it; see the module's docstring."""
        path = self._path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self._state_dict()), encoding="utf-8")
        partial.replace(path)

    def load(self, rollout_id: int | None = None) -> None:
        """Read what `save` wrote below `args.load`; nothing to do without one. Raises CheckpointError."""
        if not getattr(self.args, "load", None) or rollout_id is None:
            return
        path = self._path(self.args.load, rollout_id)
        if not path.is_file():
            raise CheckpointError(f"{path}: no data source state of rollout {rollout_id}")
        self._load_state_dict(json.loads(path.read_text(encoding="utf-8")))

    @staticmethod
    def _path(directory: str | Path, rollout_id: int) -> Path:
        return Path(directory) / "rollout" / f"slime_data_source_{rollout_id}.json"


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Groups given back wait in the list `buffer` and are drawn first, chosen by `--buffer-filter-path`.

    Raises:
        ConfigError: `--buffer-filter-path` names a buffer class, which brings its own storage.
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
        """Note who draws, for the filter."""
        self._rollout_id = rollout_id

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups, those of the buffer first."""
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
            RolloutError: An unfinished group has not `args.n_samples_per_prompt` samples; none is added then.
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
        """Add to `metadata`, which is stored with the rest."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """What `update_metadata` was given."""
        return self.metadata

    def get_buffer_length(self) -> int:
        """Groups that wait."""
        return len(self.buffer)

    def take_metrics(self) -> dict[str, float]:
        """Asked for by slime_core after a rollout."""
        return {"rollout/buffer/waiting_groups": float(len(self.buffer))}

    def _state_dict(self) -> dict[str, Any]:
        return {**super()._state_dict(), "buffer": BufferBase.pack(self.buffer)}

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        super()._load_state_dict(state)
        self.buffer = BufferBase.unpack(state.get("buffer") or [])


__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]
__getattr__ = _missing.names(__name__)
