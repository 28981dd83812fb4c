"""Read a data file as samples with slime_core's readers (`slime.utils.data`).

The run's own data source reads rows on demand. `Dataset` holds all of them, as in THUDM/slime, for functions that index
`dataset.samples`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime import _missing
from slime_core.errors import ConfigError
from slime_core.sample import Sample


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .jsonl or .parquet file, or of a slice `path@[a:b]`. Raises DataError with the place."""
    from slime_core.data.dataset import open_rows

    rows = open_rows(path, origin="read_file")
    try:
        for index in range(len(rows)):
            yield rows[index]
    finally:
        rows.close()


class Dataset:
    """All rows of a file as PENDING samples in `samples`; prompts with more than `max_length` tokens are skipped.

    A text prompt with `apply_chat_template` becomes the rendered text, as in THUDM/slime. Differences to THUDM/slime:
    samples already have their prompt ids. `shuffle` uses a separate generator, so that it does not change other random
    numbers, and the order of an epoch is the run's (`slime_core.data.prompts.epoch_order`). Images in
    `multimodal_inputs` are strings (`slime_data.images.open_image` opens them), and the processor's other
    inputs are already in `multimodal_train_inputs`.

    Raises:
        DataError: A row is unusable.
        ConfigError: `multimodal_keys` without a processor, or with kinds other than "image".
    """

    def __init__(  # noqa: PLR0913  # THUDM/slime's
        self,
        path: str,
        tokenizer: Any,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "text",
        multimodal_keys: Mapping[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str | None = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        from slime_core.data.dataset import open_rows
        from slime_core.data.rows import Columns, PromptReader

        if multimodal_keys and processor is None:
            raise ConfigError("Dataset: multimodal_keys needs the model's processor; give processor=AutoProcessor...")
        columns = Columns(
            input=prompt_key,
            label=label_key,
            metadata=metadata_key,
            tools=tool_key,
            apply_chat_template=apply_chat_template,
            template_kwargs=apply_chat_template_kwargs or {},
            max_prompt_len=max_length,
            multimodal=multimodal_keys or {},
        )
        rows = open_rows(path, origin="Dataset")
        reader = PromptReader(rows, tokenizer, columns, path, processor=processor)
        read = (reader.read(index) for index in range(len(rows)))
        self.origin_samples: list[Sample] = [sample for sample in read if sample is not None]
        rows.close()
        self.samples = list(self.origin_samples)
        self.seed = seed
        self.epoch_id = -1

    def shuffle(self, new_epoch_id: int) -> None:
        """Put `samples` into the order of an epoch: a permutation of the file's order made from seed and epoch."""
        from slime_core.data.prompts import epoch_order

        if new_epoch_id == self.epoch_id:
            return
        order = epoch_order(len(self.origin_samples), self.seed, new_epoch_id)
        self.samples = [self.origin_samples[i] for i in order]
        self.epoch_id = new_epoch_id

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


__all__ = ["Dataset", "read_file"]
__getattr__ = _missing.names(__name__)
