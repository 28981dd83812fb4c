"""Counters that an engine reports, summed over the calls of one sample: speculative decoding and prefix cache.

A sample (`sample.py`) holds one object of each class under the names of THUDM/slime. Metrics average the sums of whole
samples, not single calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class SpecInfo:
    """Speculative decoding counters, summed over the engine calls of one sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted tokens divided by drafted tokens; 0 if no token was drafted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens produced per verification step."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any], response_length: int = 0) -> None:
        """Add the counters of one engine answer, by SGLang 0.5.20's names or older ones; missing counters add 0."""
        accepted, drafted = meta_info.get("spec_num_correct_drafts", 0), meta_info.get("spec_num_proposed_drafts", 0)
        self.spec_accept_token_num += int(meta_info.get("spec_accept_token_num", accepted))
        self.spec_draft_token_num += int(meta_info.get("spec_draft_token_num", drafted))
        self.spec_verify_ct += int(meta_info.get("spec_verify_ct", 0))
        self.completion_token_num += int(meta_info.get("completion_tokens", response_length))


@dataclass
class PrefixCacheInfo:
    """Prefix cache counters, summed over the engine calls of one sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached prompt tokens divided by all prompt tokens; 0 without prompt tokens."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counters of one engine answer."""
        self.cached_tokens += int(meta_info.get("cached_tokens", 0))
        self.total_prompt_tokens += int(meta_info.get("prompt_tokens", 0))
