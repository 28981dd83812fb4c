"""Answers that follow a JSON schema or a regular expression: which tokens may come next.

The engine makes a `Constraint` of a request that asks for one, with the package llguidance (extra `constraints`), which
compiles it within bounds of its own; the sampler asks it before every token of that request. Log-probs are those of the
unconstrained distribution, as with every other cut of it, since that is what a trainer recomputes; where only one token
was allowed, it may have been improbable.
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
"""JSON without white space, which a model that has not learnt better goes on with for ever."""


class Constraint:
    """One request's grammar, and where in it the answer is."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab] which tokens may come next."""
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        found: NDArray[np.bool_] = np.zeros(self._vocab_size, dtype=np.bool_)
        bits = np.unpackbits(words, bitorder="little", count=min(self._vocab_size, 8 * len(words)))
        found[: len(bits)] = bits
        return found

    def goes_on(self, token: int) -> bool:
        """Take the token; False when nothing may come after the token."""
        return bool(self._matcher.consume_token(token)) and not self._matcher.is_stopped()


class Constraints:
    """Makes the constraints of one model's answers."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)
        self._vocabulary: Any = None

    def load(self) -> None:
        """Read the whole vocabulary, once; any thread may. Raises EngineError without tokenizer or package."""
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
        """Compile what a request asks for. Raises EngineError for what is no grammar."""
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
