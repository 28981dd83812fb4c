"""Forward FLOPs of one sequence through a dense decoder, the cost by which samples are balanced over ranks.

Called by the packing stage and by throughput metrics. Counts multiplications and additions (2 per weight), causal
attention at half the square, no normalisation or rotation. Plain arithmetic, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderShape:
    """The numbers of the architecture that FLOPs depend on."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def forward_flops(self, length: int) -> int:
        """FLOPs of a forward pass over `length` tokens; a training step costs about three times that."""
        query = self.num_heads * self.head_dim
        key_value = self.num_kv_heads * self.head_dim
        projections = 2 * length * self.hidden_size * (query + 2 * key_value + query)
        attention = 2 * (2 * length * length * query) // 2
        mlp = 2 * length * 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (projections + attention + mlp) + 2 * length * self.hidden_size * self.vocab_size

    @property
    def activations(self) -> tuple[int, int]:
        """Elements that a token leaves in a layer for the backward pass: those of the norms, and those of matrices.

        The counting of Korthikanti et al. (2022) for grouped queries, a gated block and attention without scores.
        """
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return 4 * self.hidden_size, 2 * query + 2 * key_value + 3 * self.intermediate_size
