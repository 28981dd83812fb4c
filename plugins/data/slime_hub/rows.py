"""A data set of the hub -> one parquet file of its split in the assets cache, which the data source reads as any file.

`datasets` reads whatever the repository has (parquet, JSON, CSV, text, its configurations). The file's place has the
commit, so a split is downloaded and converted once, and read without a network from then on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

from slime_core.distributions import BUNDLE
from slime_core.errors import ConfigError
from slime_hub.client import endpoint, is_offline, not_cached, token, translated
from slime_hub.names import HubName


def parquet_file(name: HubName, cited: str, *, only_cached: bool) -> Path | None:
    """Return the file of a data set's split; None if only the cache may be used and lacks it.

    Args:
        name: Name with a commit and a split.
        cited: The setting, for messages.
        only_cached: Send no request.

    Raises:
        ConfigError: No such configuration or split, or the files cannot be had.
    """
    from huggingface_hub import cached_assets_path

    assert name.is_commit
    assert name.split is not None
    folder = cached_assets_path(library_name="slime", namespace=name.repo, subfolder=str(name.revision))
    words = (name.repo.rpartition("/")[2], name.config or "default", name.split)
    path = folder / f"{'-'.join(words)}.parquet"
    if not path.is_file():
        if only_cached:
            return None
        if is_offline():
            raise not_cached(name, "dataset", cited)
        data, partial = _load(name, cited), path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            data.to_parquet(str(partial))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def _load(name: HubName, cited: str) -> Any:
    """Return the split as a `datasets.Dataset`. Raises ConfigError."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{cited}: reading a data set of the hub needs: pip install '{BUNDLE}[hub]'") from error
    datasets.config.HF_ENDPOINT = endpoint()
    try:
        with translated(name, "dataset", cited):
            return datasets.load_dataset(
                f"hf://datasets/{name.repo}", name.config, split=name.split, revision=name.revision, token=token()
            )
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        told = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"{cited}: {told}; name configuration and split: hf:{name.repo}:config[split]") from error
