"""What an engine tells of its calls, summed over those of one sample: speculative decoding, prefix cache.

`sample.py` keeps one of each, and names them as THUDM/slime does. Metrics average the sums of whole samples, not the
calls.
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
        """Accepted over drafted tokens."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens produced per verification step."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any], response_length: int = 0) -> None:
        """Add the counters of one engine answer, as older SGLang or 0.5.20 names them; absent ones add nothing."""
        accepted, drafted = meta_info.get("spec_num_correct_drafts", 0), meta_info.get("spec_num_proposed_drafts", 0)
        self.spec_accept_token_num += int(meta_info.get("spec_accept_token_num", accepted))
        self.spec_draft_token_num += int(meta_info.get("spec_draft_token_num", drafted))
        self.spec_verify_ct += int(meta_info.get("spec_verify_ct", 0))
        self.completion_token_num += int(meta_info.get("completion_tokens", response_length))


@dataclass
class PrefixCacheInfo:
    """How many prompt tokens the engine found in its cache, summed over the calls of one sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached over all prompt tokens."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counters of one engine answer."""
        self.cached_tokens += int(meta_info.get("cached_tokens", 0))
        self.total_prompt_tokens += int(meta_info.get("prompt_tokens", 0))
