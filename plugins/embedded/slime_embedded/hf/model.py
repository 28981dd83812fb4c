"""Any causal language model of transformers in the place of a `Decoder`, for the embedded trainer and engine.

`from_directory` loads the model and probes it: which layouts of a batch give each sequence the hidden states that it
has alone, and how hidden states become logits. Some families mix packed samples without an error, and a release of
transformers can change any, so there is no list of families. Dropout is turned off and routers run in evaluation mode,
since two passes over a sample must agree.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slime_core.errors import CheckpointError, ConfigError
from slime_core.models.config import ModelConfig
from slime_embedded.hf.files import Places, WeightFiles, places
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.logprobs import CHUNK_ELEMENTS, log_probs_from_logits, token_log_probs
from slime_embedded.models.packed import GROUP_RATIO, PackedLayout
from slime_embedded.models.routing import Routing

logger = logging.getLogger(__name__)
PACKED, ROWS, ALONE = "packed", "rows", "alone"
_PROBE = (9, 14, 6)
"""Lengths of the probe's sequences."""
_EXACT = 1e-4
"""Difference of hidden states, relative to the largest, below which it is rounding; mixed samples differ by 0.1."""
_LARGE = 200.0
"""Logits of the probe, large enough to show a soft cap."""
_OFF = ("dropout", "_pdrop")
_OWN = {"local_files_only": True, "trust_remote_code": False}
_CANNOT = (OSError, ValueError, ImportError, RuntimeError, AttributeError, KeyError, TypeError)
"""Errors of transformers for models that it cannot build or load."""


class _Unregistered:
    """Modules and functions that `nn.Module` must not register a second time."""

    def __init__(self, loaded: Any) -> None:
        self.model, self.head = loaded, loaded.get_output_embeddings()
        self.base = loaded.model if loaded.base_model is loaded else loaded.base_model


class _States:
    """The output of a base model for given hidden states; other fields are None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()


def quiet_config(directory: str) -> Any:
    """Return the configuration that transformers reads, without dropout. Raises as AutoConfig does."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(directory, **_OWN)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name in [name for name in vars(part) if name.endswith(_OFF) and isinstance(getattr(part, name), float)]:
            setattr(part, name, 0.0)
    return config


def load_transformers(auto: str, directory: str, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a model of an HF-layout directory by the class `auto` of transformers, in evaluation mode.

    Raises:
        ConfigError: transformers cannot load it.
        CheckpointError: Tensors are missing, unknown or of another shape.
    """
    import transformers

    try:
        load: Any = getattr(transformers, auto).from_pretrained
        config = quiet_config(directory)
        loaded, info = load(directory, config=config, dtype=dtype, output_loading_info=True, **_OWN)
    except _CANNOT as error:
        raise ConfigError(f"{directory}: transformers cannot load its model: {error}") from error
    problems = [f"missing {name}" for name in sorted(info["missing_keys"])]
    problems += [f"unknown {name}" for name in sorted(info["unexpected_keys"])]
    if problems:
        raise CheckpointError(f"{directory}: the tensors do not fit its config.json: {', '.join(problems[:20])}")
    return loaded.to(device).eval()


def freeze_buffers(model: nn.Module) -> None:
    """Make the numbers that files hold and no gradient changes, such as the biases of routers, frozen parameters.

    So they are saved, sent to engines and read from files like every parameter.
    """
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


class TransformersModel(Decoder):
    """A causal language model of transformers; parameters have transformers' names, and `places` those of the files.

    Args:
        config: Sizes of the model.
        loaded: The model of transformers.
    """

    def __init__(self, config: ModelConfig, *, loaded: Any) -> None:
        nn.Module.__init__(self)
        self.config = config
        for name, child in loaded.named_children():
            self.add_module(name, child)
        self.inner = _Unregistered(loaded)
        if loaded.config.get_text_config() is not loaded.config:  # parts for images have no gradient
            self.requires_grad_(False)
            for part in (loaded.get_decoder(), self.inner.head):
                part.requires_grad_(True)
        freeze_buffers(self)
        self.places: Places = places(loaded, [name for name, _ in self.named_parameters()])
        self.exact = {ALONE}
        """Layouts that give each sequence the hidden states that it has alone."""
        self.scale: float | None = None
        """Factor of the product with `head_weight` in the logits; None: logits are more than such a product."""

    @classmethod
    def from_directory(
        cls,
        config: ModelConfig,
        directory: str,
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype = torch.float32,
    ) -> TransformersModel:
        """Load and probe the model of an HF-layout directory. Raises as `load_transformers`, and ConfigError."""
        found = cls(config, loaded=load_transformers("AutoModelForCausalLM", directory, device, dtype))
        found.probe()
        return found

    @classmethod
    def without_weights(cls, config: ModelConfig, directory: str) -> TransformersModel:
        """Build the model of a directory with undefined weights; it must be probed when it has its own."""
        from transformers import AutoModelForCausalLM
        from transformers.conversion_mapping import get_model_conversion_mapping

        try:
            build: Any = AutoModelForCausalLM.from_config
            built = build(quiet_config(directory), dtype=torch.float32)
        except _CANNOT as error:
            raise ConfigError(f"{directory}: transformers cannot build its model: {error}") from error
        found = cls(config, loaded=built.eval())
        if not found.held <= WeightFiles(directory).shapes.keys():
            # Without a loaded file, transformers does not know the prefix that a language model has among other parts.
            built._weight_conversions = get_model_conversion_mapping(built, add_legacy=False)
            found.take_places(built)
        return found

    def take_places(self, loaded: Any) -> None:
        """Take the names of files that transformers gives the parameters of a model that it has loaded."""
        self.places = places(loaded, [name for name, _ in self.named_parameters()])

    @property
    def held(self) -> set[str]:
        """Return the names of the files' tensors that the parameters hold."""
        return {place.name for found in self.places.values() for place in found}

    def recompute_layers(self) -> None:
        """Keep only each layer's input for the backward pass. Raises ConfigError if the class cannot."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        model = self.inner.model
        if not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"--recompute-granularity full: {type(model).__name__} of transformers recomputes no layers; remove it"
            )
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)):
            layer.training = True  # recomputed in training mode only; its parts stay in evaluation mode

    @property
    def description(self) -> str:
        """Return a line for the log: class, attention, and how samples share a pass."""
        model = self.inner.model
        shared = {
            PACKED: "packed or in padded rows of similar length, whichever takes less",
            ROWS: f"in padded rows of similar length, at most {GROUP_RATIO} times the tokens (packing would mix them)",
            ALONE: "one by one, a pass for each sample (packing and padding would mix them)",
        }
        how = next(text for layout, text in shared.items() if layout in self.exact)
        kind = model.config._attn_implementation
        return f"{type(model).__name__} of transformers, {kind} attention: samples go {how}"

    def ignored(self, names: Iterable[str]) -> set[str]:
        """Return the names of the files' tensors that transformers does not load, such as layers for prediction."""
        patterns = self.inner.model._keys_to_ignore_on_load_unexpected or ()
        return {name for name in set(names) - self.held if any(re.search(pattern, name) for pattern in patterns)}

    def left_out(self, directory: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a directory that the model does not hold, such as a vision tower's."""
        files = WeightFiles(directory)
        yield from ((name, files.read(name)) for name in sorted(self.ignored(files.shapes)))

    # -- hidden states -------------------------------------------------------------------------------

    def states(self, token_ids: torch.Tensor, **inputs: Any) -> Any:
        """Run the base model on [n, length] ids; return its output with `last_hidden_state` [n, length, hidden]."""
        return self.inner.base(input_ids=token_ids, **inputs)

    def hidden(
        self,
        token_ids: torch.Tensor,
        lengths: Sequence[int],
        *,
        rows: np.ndarray | None = None,
        same: np.ndarray | None = None,
        routing: Routing | None = None,
    ) -> torch.Tensor:
        """Return hidden states like `Decoder.hidden`; `same` saves nothing here, and there is no routing replay."""
        assert routing is None, "models of transformers have no routing replay"
        return self.laid_out(self._layout(lengths), token_ids, lengths, rows)

    def _layout(self, lengths: Sequence[int]) -> str:
        """Choose the exact layout with the least work: a pair in attention is 1 / (6 hidden) of a token's matrices."""
        if ROWS not in self.exact:
            return PACKED if PACKED in self.exact else ALONE
        if PACKED not in self.exact:
            return ROWS
        total, pair = sum(lengths), 1 / (6 * self.config.hidden_size)
        groups = PackedLayout.build(lengths).groups
        padded = sum(n * length * (1 + length * pair) for n, length in groups)
        return PACKED if total * (1 + total * pair) < padded else ROWS

    def laid_out(
        self, layout: str, token_ids: torch.Tensor, lengths: Sequence[int], rows: np.ndarray | None = None
    ) -> torch.Tensor:
        """Return the hidden states [R or T, hidden] of sequences that share a pass as `layout` says."""
        if layout == ROWS:
            return self._padded(token_ids, lengths, rows)
        device = token_ids.device
        hidden: torch.Tensor
        if layout == PACKED:
            positions = torch.cat([torch.arange(length, device=device) for length in lengths])
            hidden = self.states(token_ids[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]
        else:
            parts = torch.split(token_ids, list(lengths))
            hidden = torch.cat([self.states(part[None], use_cache=False).last_hidden_state[0] for part in parts])
        return hidden if rows is None else hidden[torch.from_numpy(rows).to(device)]

    def _padded(self, token_ids: torch.Tensor, lengths: Sequence[int], rows: np.ndarray | None) -> torch.Tensor:
        """Run rows padded on the right, which no real token sees."""
        tables = PackedLayout.build(lengths, token_ids.device, rows)
        padded = token_ids if tables.pad is None else token_ids[tables.pad.index]
        parts = torch.split(padded, [n * length for n, length in tables.groups])
        found = [
            self.states(part.view(n, length), use_cache=False).last_hidden_state.flatten(0, 1)
            for part, (n, length) in zip(parts, tables.groups, strict=True)
        ]
        back = tables.unpad if rows is None else tables.unpad_keep
        hidden: torch.Tensor = found[0] if len(found) == 1 else torch.cat(found)
        return hidden if back is None else back(hidden)

    # -- logits --------------------------------------------------------------------------------------

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight of the output layer, [vocab, hidden]."""
        weight: torch.Tensor = self.inner.head.weight
        return weight

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, vocab] of [R, hidden]."""
        return self._own_logits(hidden) if self.scale is None else super().logits(hidden) * self.scale

    def _own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute `logits` by the model's own forward pass, with these states as those of its base model."""
        base = self.inner.base
        base.forward = lambda *_, **__: _States(hidden[None])
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            found: torch.Tensor = self.inner.model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del base.forward
        return found

    def log_probs(self, hidden: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probs and entropy as `Decoder.log_probs`; soft-capped logits are recomputed chunk by chunk."""
        if self.scale is not None:
            return token_log_probs(hidden * self.scale if self.scale != 1 else hidden, self.head_weight, **how)
        targets, mask, size = how.pop("targets"), how.pop("mask", None), how.pop("chunk_size", None)
        if mask is not None:
            return log_probs_from_logits(self.logits(hidden), targets, mask=mask, **how)
        size = size if size and size > 0 else CHUNK_ELEMENTS.get(hidden.device.type, 2**22) // self.config.vocab_size
        chunks = zip(torch.split(hidden, max(1, size)), torch.split(targets, max(1, size)), strict=True)

        def scores(states: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return log_probs_from_logits(self.logits(states), chosen, **how)

        found = [checkpoint(scores, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        if not found:
            return log_probs_from_logits(self.logits(hidden), targets, **how)
        entropies = [entropy for _, entropy in found if entropy is not None]
        return torch.cat([part for part, _ in found]), torch.cat(entropies) if entropies else None

    # -- probe ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def probe(self) -> None:
        """Find `exact` and `scale` by passes over random tokens.

        Raises:
            ConfigError: The logits do not follow from the hidden states.
        """
        device, generator = next(self.parameters()).device, torch.Generator().manual_seed(0)
        ids = torch.randint(self.config.vocab_size, (sum(_PROBE),), generator=generator).to(device)
        alone = self.laid_out(ALONE, ids, _PROBE)
        for layout in (PACKED, ROWS):
            if agree(lambda layout=layout: self.laid_out(layout, ids, _PROBE), alone):  # type: ignore[misc]
                self.exact.add(layout)
        first = alone[: _PROBE[0]]
        expected = self.inner.model(input_ids=ids[None, : len(first)], use_cache=False).logits[0]
        if not agree(lambda: self._own_logits(first), expected):
            raise ConfigError(
                f"{self.config.model_type}: the logits of {type(self.inner.model).__name__} do not follow from the last"
                " hidden states of its base model; slime cannot train it"
            )
        head = self.inner.head
        if head is not None and getattr(head, "bias", None) is None and head.weight.shape[1:] == first.shape[1:]:
            large = first * (_LARGE / float((first @ head.weight.T).abs().max()))
            plain, capped = large.double() @ head.weight.double().T, self._own_logits(large).double()
            scale = float((plain * capped).sum() / (plain * plain).sum())
            if agree(lambda: plain * scale, capped):
                self.scale = 1.0 if abs(scale - 1) < 1e-5 else scale


def agree(compute: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    """Return whether the result is as expected up to rounding; False if the model does not take the inputs."""
    try:
        found = compute()
    except (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError) as error:
        logger.debug("a layout of the probe is refused: %s", error)
        return False
    rounding = _EXACT if expected.dtype != torch.bfloat16 else 0.05
    return found.shape == expected.shape and bool((found - expected).abs().max() <= rounding * expected.abs().max())
