"""Megatron's gated full attention, also with more tensor-parallel ranks than key-value heads.

`megatron.layer_spec` puts it in the place of `SelfAttention`. Where several ranks share a key-value head, Megatron
gives each of them the projection of the whole group and takes the rank's query heads out of it, but not their gates
(transformer/attention.py, `get_query_key_value_tensors`); this takes out the gates as well.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention


class GatedSelfAttention(SelfAttention):  # type: ignore[misc]
    """`SelfAttention` with `attention_output_gate`."""

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> Any:
        """Query, key, value and gate, [tokens, batch, heads of this rank, head_dim] each."""
        query, key, value, gate = super().get_query_key_value_tensors(*args, **options)
        sharing = self.world_size // self.config.num_query_groups
        if sharing > 1:
            gate = gate.chunk(sharing, 2)[self.tp_group.rank() % sharing]
        return query, key, value, gate
