"""Constrain answers to a JSON schema or a regular expression, by the set of tokens that may come next.

The engine makes a `Constraint` for a request with a grammar, using the package llguidance (extra `constraints`), which
limits the cost of compilation itself. The sampler queries the constraint before every token of the request. Log-probs
are computed from the unconstrained distribution, as with every other truncation, because a trainer recomputes that
distribution; the only allowed token may therefore be improbable.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import EngineError

if TYPE_CHECKING:
    from slime_embedded.engine.sampling_params import SamplingParams

_COMPACT: Any = {"whitespace_flexible": False}
"""Options for JSON without white space, since an untrained model may generate white space without end."""


class Constraint:
    """The grammar of a request, with the current position of the answer."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Return the mask [vocab] of tokens that may come next."""
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        found: NDArray[np.bool_] = np.zeros(self._vocab_size, dtype=np.bool_)
        bits = np.unpackbits(words, bitorder="little", count=min(self._vocab_size, 8 * len(words)))
        found[: len(bits)] = bits
        return found

    def goes_on(self, token: int) -> bool:
        """Consume the token; return False if no token may follow."""
        return bool(self._matcher.consume_token(token)) and not self._matcher.is_stopped()


class Constraints:
    """The factory of constraints for one model's vocabulary."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)
        self._vocabulary: Any = None

    def load(self) -> None:
        """Read the whole vocabulary once, from any thread. Raises EngineError without tokenizer or package."""
        if self._vocabulary is not None:
            return
        if self._tokenizer is None:
            raise EngineError("json_schema and regex need a tokenizer, and the model directory has none")
        try:
            import llguidance.hf
        except ImportError as error:
            raise EngineError(
                "json_schema and regex need the package llguidance; type: pip install 'slime-rl-core[constraints]'"
            ) from error
        self._vocabulary = llguidance.hf.from_tokenizer(
            self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_ids or None
        )

    def make(self, params: SamplingParams) -> Constraint:
        """Compile the grammar of a request. Raises EngineError if it is invalid."""
        self.load()
        from llguidance import LLMatcher

        name = "json_schema" if params.json_schema is not None else "regex"
        try:
            if params.json_schema is not None:
                grammar = LLMatcher.grammar_from_json_schema(params.json_schema, overrides=_COMPACT)
            else:
                grammar = LLMatcher.grammar_from_regex(params.regex or "")
            matcher = LLMatcher(self._vocabulary, grammar)
        except ValueError as error:
            raise EngineError(f"sampling_params: {name}: {str(error)[:200]}") from error
        if matcher.is_error():
            raise EngineError(f"sampling_params: {name}: {matcher.get_error()[:200]}")
        return Constraint(matcher, self._vocab_size)
