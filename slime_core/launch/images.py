"""Whether every component of a run with images takes them, looked at before anything starts.

Called by `launch/components.py`. A component says so itself, in its traits: the classes of an engine and a trainer, and
a generate function. A trainer that takes images still needs a model that does; the trainer says so when it loads one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime_core.config import Settings
from slime_core.data.images import check_kinds
from slime_core.errors import ConfigError
from slime_core.plugins.adapters import GenerateCaller
from slime_core.protocols import EngineTraits, TrainerTraits, traits_of

if TYPE_CHECKING:
    from slime_core.launch.components import Components


def check_images(settings: Settings, parts: Components, generators: Sequence[GenerateCaller]) -> None:
    """Raise ConfigError where `--multimodal-keys` is set, for training or an evaluation data set, and a part of the run
    would leave images out."""
    args = settings.args
    asked = {settings.cite("multimodal_keys"): args.multimodal_keys} if args.multimodal_keys else {}
    for dataset in args.eval_datasets:
        if dataset.multimodal_keys and dataset.multimodal_keys != args.multimodal_keys:
            asked[f"multimodal_keys of evaluation data set {dataset.name!r}"] = dataset.multimodal_keys
    if not asked:
        return
    for columns in asked.values():
        check_kinds(columns)
    origin = next(iter(asked))
    if parts.engine is not None and not traits_of(parts.engine, EngineTraits).takes_images:
        raise ConfigError(
            f"{origin}: {settings.cite('rollout_engine')} generates from text only; type --rollout-engine sglang or"
            " --rollout-engine http"
        )
    if parts.trainer is not None and not traits_of(parts.trainer, TrainerTraits).takes_images:
        raise ConfigError(
            f"{origin}: {settings.cite('train_backend')} trains on text only; type --train-backend embedded"
        )
    for generator in generators:
        if not generator.traits.takes_images:
            raise ConfigError(
                f"{origin}: {generator.label} does not give images to the engine; use single_turn, or a function with"
                " @declares(GenerateTraits(takes_images=True)), which passes image_data=sample.image_data()"
            )
