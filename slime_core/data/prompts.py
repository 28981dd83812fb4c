"""Convert rows of `--prompt-data` to groups of PENDING samples with their prompt ids.

The rollout draws groups here and gives unfinished groups back. The order of an epoch is a permutation of the file's
order, determined by (`--rollout-seed`, epoch) alone, so the cursor in `state_dict` is a few integers. Prompts over
`--rollout-max-prompt-len` are skipped only when they are drawn, so `len()` counts them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from slime_core.config.sections.evaluation import EvalDataset
from slime_core.data.buffer import SampleBuffer, resolve_buffer
from slime_core.data.dataset import Rows, has_row, open_rows
from slime_core.data.ledger import PassedRow
from slime_core.data.rows import Columns, PromptReader
from slime_core.data.tokenizer import Tokenizer, load_tokenizer
from slime_core.distributions import provided
from slime_core.errors import CheckpointError, ConfigError, DataError
from slime_core.protocols import Args, BufferFilter, GroupBuffer
from slime_core.sample import Group, Sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STATE_VERSION = 1
Place: TypeAlias = tuple[int, int]
"""Epoch, and position of the row in its order."""


class ReadAhead(Protocol):
    """`--num-data-workers`: rows that threads read while a rollout generates (`slime_data.read_ahead`)."""

    def take(self, place: Place, upcoming: Callable[[], Iterator[tuple[Place, int]]]) -> Sample | None:
        """Return the sample of the row at `place`, the first of `upcoming()`, and start reading the next rows."""

    def close(self) -> None:
        """End the threads."""


class DatasetSource:
    """The built-in data source (kind `data_sources`, name `dataset`)."""

    def __init__(
        self, args: Args, tokenizer: Tokenizer | None = None, buffer_filter: BufferFilter | GroupBuffer | None = None
    ) -> None:
        """Open the data and check its first and last row.

        Args:
            args: The run's settings.
            tokenizer: HF tokenizer; loaded from `args.hf_checkpoint` when left out.
            buffer_filter: Resolved from `args.buffer_filter_path` when left out.

        Raises:
            DataError: The data cannot be used.
            ConfigError: No data is set, or there is no tokenizer.
        """
        self.args = args
        self.group_size = int(args.n_samples_per_prompt)
        self.tokenizer = tokenizer
        self.rows: Rows | None = None
        self._reader: PromptReader | None = None
        self._epoch = self._offset = self._next_group = self._next_sample = 0
        self.num_skipped = 0
        """Number of prompts skipped for their length, over the run."""
        self._passed: list[PassedRow] | None = None
        """Rows that the cursor has passed since the last `take_passed_rows`; None if they are not recorded."""
        self._orders: dict[int, NDArray[Any]] = {}
        """Row order of each epoch that rows are read from."""
        self._ahead: ReadAhead | None = None
        plugin = resolve_buffer(args) if buffer_filter is None else buffer_filter
        self.buffer = SampleBuffer(args, self.group_size, plugin)
        if args.rollout_global_dataset:
            self._open()

    def _open(self) -> None:
        self.rows = self.open_rows()
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.args.hf_checkpoint)
        columns, name = Columns.of_run(self.args), self._named
        self._reader = PromptReader(self.rows, self.tokenizer, columns, name)
        for index in {0} if self._streams else {0, len(self.rows) - 1}:
            self._reader.read(index)
        if workers := self.args.num_data_workers:
            rows, tokenizer = self.rows, self.tokenizer
            self._ahead = provided("slime.data", "read_ahead").ReadAhead(
                lambda: PromptReader(rows, copy.deepcopy(tokenizer), columns, name).read,
                workers,
                window=max(2 * (self.args.rollout_batch_size or 1), 2 * workers),
            )

    @property
    def _streams(self) -> bool:
        return self.args.streaming_data

    def open_rows(self) -> Rows:
        """Open the rows of `--prompt-data`; a subclass may return other rows. Raises ConfigError, DataError."""
        if not self.args.prompt_data:
            raise ConfigError(
                "--prompt-data is not set; name a .jsonl or .parquet file, or --disable-rollout-global-dataset"
            )
        return open_rows(self.args.prompt_data, stream=self._streams)

    @property
    def _named(self) -> str:
        """Name of the rows for messages."""
        return str(self.args.prompt_data or (self.rows.path if self.rows is not None else "--prompt-data"))

    def __len__(self) -> int:
        """Return the number of rows of an epoch, including prompts that are too long; 0 without a data set."""
        return self._num_rows

    @property
    def _num_rows(self) -> int:
        return len(self.rows) if self.rows is not None else 0

    # -- drawing -------------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return `num_samples` groups: waiting groups first, then the next rows, into the next epochs as needed.

        Raises:
            DataError: A row cannot be used, or every prompt of the data is too long.
        """
        groups = self.buffer.take(num_samples)
        while len(groups) < num_samples:
            groups.append(self._number(self._next_prompt()))
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Take back groups, which are drawn again first. Raises RolloutError for a group of the wrong size."""
        self.buffer.add(samples)

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """Pass the drawing rollout and the newest weight version to the buffer."""
        self.buffer.begin_rollout(rollout_id, weight_version)

    def observe(self, groups: list[Group], trained: bool) -> None:
        """Pass scored groups to the buffer: groups for training, or a group that the dynamic filter dropped."""
        self.buffer.observe(groups, trained)

    def take_metrics(self) -> dict[str, float]:
        """Return the buffer's metrics since the last call."""
        return self.buffer.take_metrics()

    def _next_prompt(self) -> Sample:
        if self._reader is None:
            return Sample()
        too_long = declined = 0
        while self._has(too_long):
            row, sample = self._advance()
            if sample is None:
                too_long += 1
                self.num_skipped += 1
                self._pass(row, reason="too long")
                continue
            too_long, sample.row = 0, row
            if self.buffer.wants(sample) or not self._has(declined):
                return sample
            declined += 1
            self._pass(row, reason="declined by the buffer")
        raise DataError(
            f"{self._named}: none of the {self._num_rows} prompts has at most"
            f" --rollout-max-prompt-len {self.args.rollout_max_prompt_len} tokens"
        )

    def _has(self, index: int) -> bool:
        """Return whether an epoch has a row with this index."""
        return self.rows is not None and has_row(self.rows, index)

    def _advance(self) -> tuple[int, Sample | None]:
        """Move the cursor by one row; return the row's index in the file's order, and its sample."""
        assert self._reader is not None
        place, row = next(self._upcoming())
        sample = self._reader.read(row) if self._ahead is None else self._ahead.take(place, self._upcoming)
        self._epoch, self._offset = place[0], place[1] + 1
        return row, sample

    def _upcoming(self) -> Iterator[tuple[Place, int]]:
        """Yield rows from the cursor on, endlessly: (epoch, position in its order), and index in the file's order."""
        epoch, position = self._epoch, self._offset
        while True:
            if not self._has(position):
                epoch, position = epoch + 1, 0
            yield (epoch, position), self._row_at(epoch, position)
            position += 1

    def _row_at(self, epoch: int, position: int) -> int:
        if not self.args.rollout_shuffle:
            return position
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e >= self._epoch}
            self._orders[epoch] = epoch_order(self._num_rows, self.args.rollout_seed, epoch)
        return int(self._orders[epoch][position])

    def _number(self, prompt: Sample) -> Group:
        group = [copy.deepcopy(prompt) for _ in range(self.group_size - 1)] + [prompt]
        for sample in group:
            sample.group_index, sample.index = self._next_group, self._next_sample
            self._next_sample += 1
        if prompt.row is not None:
            self._pass(prompt.row, group_index=self._next_group)
        self._next_group += 1
        return group

    # -- for the ledger ------------------------------------------------------------------------------

    def _pass(self, row: int, *, group_index: int | None = None, reason: str | None = None) -> None:
        if self._passed is not None:
            self._passed.append(PassedRow(self._epoch, row, group_index, reason))

    def take_passed_rows(self) -> list[PassedRow]:
        """Return rows that became groups or were skipped since the last call; recording begins with the first call."""
        passed, self._passed = self._passed or [], []
        return passed

    @property
    def cursor(self) -> dict[str, int]:
        """Position in the data of the next prompt."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "num_rows": self._num_known(),
            "next_group_index": self._next_group,
        }

    def _num_known(self) -> int:
        """Return the known rows of an epoch; of a streamed file, at least one more than were drawn, if any are left."""
        if not self._streams or self._epoch or not self._has(self._offset):
            return self._num_rows
        return self._offset + 1

    @property
    def replays(self) -> bool | int:
        """See `BufferBase.replays`."""
        return self.buffer.replays

    @property
    def drops(self) -> bool:
        """See `BufferBase.drops`."""
        return self.buffer.drops

    # -- storing -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return cursor, counters, waiting groups and the data's fingerprint as JSON values."""
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "offset": self._offset,
            "next_group_index": self._next_group,
            "next_sample_index": self._next_sample,
            "num_skipped": self.num_skipped,
            "buffer": self.buffer.state_dict(),
            "data": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`.

        Raises:
            CheckpointError: The data or its order has changed, or the state has another version.
        """
        if state.get("version") != _STATE_VERSION:
            raise CheckpointError(f"data source state has version {state.get('version')!r}; this is {_STATE_VERSION}")
        _check_unchanged(state["data"], self._fingerprint(), self._named)
        self.buffer.load_state_dict(state["buffer"])
        self._epoch, self._offset = int(state["epoch"]), int(state["offset"])
        self._next_group, self._next_sample = int(state["next_group_index"]), int(state["next_sample_index"])
        self.num_skipped = int(state["num_skipped"])

    def _fingerprint(self) -> dict[str, object] | None:
        if self.rows is None:
            return None
        shuffle = self.args.rollout_shuffle
        seed = int(self.args.rollout_seed) if shuffle else None
        return {**self.rows.fingerprint(), "spec": str(self.args.prompt_data), "shuffle": shuffle, "seed": seed}

    def close(self) -> None:
        """Close the data file."""
        if self._ahead is not None:
            self._ahead.close()
        if self.rows is not None:
            self.rows.close()


def epoch_order(num_rows: int, seed: int, epoch: int) -> NDArray[Any]:
    """Return the [num_rows] permutation of the file's order, determined by the arguments alone."""
    import numpy as np

    return np.random.default_rng((seed, epoch)).permutation(num_rows)


def eval_samples(args: Args, dataset: EvalDataset, tokenizer: Tokenizer) -> list[Group]:
    """Return the groups of an evaluation data set, `dataset.n_samples_per_eval_prompt` samples per prompt.

    Args:
        args: The run's settings, read for the tools; `dataset` already has all other fallbacks.
        dataset: The data set.
        tokenizer: HF tokenizer.

    Raises:
        DataError: A row cannot be used, or every prompt is too long.
    """
    rows = open_rows(dataset.path, origin=f"evaluation data set {dataset.name!r}:")
    reader = PromptReader(rows, tokenizer, Columns.of_eval(dataset, args), dataset.path)
    groups: list[Group] = []
    for index in range(len(rows)):
        prompt = reader.read(index)
        if prompt is None:
            continue
        _apply_dataset_settings(args, prompt, dataset)
        size = dataset.n_samples_per_eval_prompt
        group = [copy.deepcopy(prompt) for _ in range(size)]
        for position, sample in enumerate(group):
            sample.group_index, sample.index = len(groups), len(groups) * size + position
        groups.append(group)
    rows.close()
    if not groups:
        raise DataError(
            f"evaluation data set {dataset.name!r} ({dataset.path}): every prompt is over --eval-max-prompt-len"
        )
    return groups


def _apply_dataset_settings(args: Args, prompt: Sample, dataset: EvalDataset) -> None:
    """Apply a data set's settings: a row keeps its own reward and generate function, overrides replace its metadata.

    The run's reward is not written into the sample: a user's reward that asks for another by its own settings gets it.
    """
    prompt.metadata.update({**(dataset.metadata_overrides or {}), "source_name": dataset.name})
    if (dataset.custom_rm_path, dataset.rm_type) != (args.custom_rm_path, args.rm_type) and not (
        prompt.custom_rm_path or prompt.metadata.get("rm_type")
    ):
        prompt.custom_rm_path = dataset.custom_rm_path
        if dataset.rm_type is not None:
            prompt.metadata["rm_type"] = dataset.rm_type
    prompt.generate_function_path = prompt.generate_function_path or dataset.custom_generate_function_path


def _check_unchanged(then: Mapping[str, object] | None, now: Mapping[str, object] | None, spec: str) -> None:
    """Raise CheckpointError with each difference; a file that only moved counts as the same data."""
    if then is None or now is None:
        if then is not now:
            raise CheckpointError("the checkpoint and this run differ in whether they have a data set (--prompt-data)")
        return
    names = {
        "num_rows": "rows",
        "size": "file size in bytes",
        "sha256": "content hash of the file's head and tail",
        "shuffle": "--rollout-shuffle",
        "seed": "--rollout-seed",
    }
    if None in (then.get("num_rows"), now.get("num_rows")):
        del names["num_rows"]  # a streamed file's are not counted
    if then.get("shuffle") != now.get("shuffle"):
        del names["seed"]  # only a shuffled order has one
    changed = [f"{names[k]} was {then.get(k)}, is {now.get(k)}" for k in names if then.get(k) != now.get(k)]
    if changed:
        raise CheckpointError(
            f"--prompt-data {spec} is not the data of the checkpoint ({then.get('spec')}), so its cursor is void:"
            f" {'; '.join(changed)}. Restore the data, or start a new run from the checkpoint's weights"
        )
