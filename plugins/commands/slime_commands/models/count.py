"""`Numbers` -> parameters and FLOPs, plain arithmetic.

For `slime models`. Multi-token prediction, vision towers and the router's correction bias (a buffer in transformers)
are not counted. Checked against the models that transformers builds from the same presets.
"""

from __future__ import annotations

from slime_commands.models.numbers import DeltaNet, Indexer, LatentAttention, Numbers


def parameters(n: Numbers) -> int:
    """Parameters of the whole model."""
    return _matrices(n, active=False) + _rest(n) + _embeddings(n)


def active_parameters(n: Numbers) -> int:
    """Parameters that one token meets: of the experts only those it is routed to."""
    return _matrices(n, active=True) + _rest(n) + _embeddings(n)


def forward_flops_per_token(n: Numbers, length: int) -> int:
    """FLOPs of a forward pass over `length` tokens, per token; training costs about three times that.

    2 per weight of the matrices, the output layer included and the embedding not, and causal softmax attention over
    the mean context of length / 2, or over the keys an indexer leaves. Norms, rotations, convolutions and the states
    of delta nets are left out.
    """
    latent = n.latent
    qk = latent.qk_size + latent.rope_size if latent else n.head_size
    value = latent.value_size if latent else n.head_size
    context = length / 2
    attended = min(context, n.indexer.keys) if n.indexer else context
    attention = n.softmax_layers * 2 * n.heads * (qk + value) * attended
    if n.indexer:
        attention += n.indexer.layers * 2 * n.indexer.heads * n.indexer.head_size * context
    head = n.vocab_size * n.hidden_size
    return int(2 * (_matrices(n, active=True) + head) + attention)


def _embeddings(n: Numbers) -> int:
    return n.vocab_size * n.hidden_size * (1 if n.tied else 2)


def _matrices(n: Numbers, *, active: bool) -> int:
    """Weights of all layers' matrix products."""
    attention = _latent(n, n.latent) if n.latent else _grouped_query(n)
    total = n.softmax_layers * attention
    if n.delta_net:
        total += (n.layers - n.softmax_layers) * _delta_net(n, n.delta_net)
    if n.indexer and n.latent:
        total += n.indexer.layers * _indexer(n, n.indexer, n.latent)
    total += (n.layers - n.expert_layers) * 3 * n.hidden_size * n.ffn_size
    if n.experts:
        e = n.experts
        used = e.per_token if active else e.number
        gate = n.hidden_size if e.shared_gate else 0
        total += n.expert_layers * (
            n.hidden_size * e.number + 3 * n.hidden_size * (used * e.ffn_size + e.shared_size) + gate
        )
    return total


def _grouped_query(n: Numbers) -> int:
    query, key_value = n.heads * n.head_size, n.kv_groups * n.head_size
    return n.hidden_size * (query * (2 if n.output_gate else 1) + 2 * key_value + query)


def _latent(n: Numbers, a: LatentAttention) -> int:
    query = n.heads * (a.qk_size + a.rope_size)
    queries = n.hidden_size * query if a.q_rank is None else a.q_rank * (n.hidden_size + query)
    keys_and_values = n.hidden_size * (a.kv_rank + a.rope_size) + a.kv_rank * n.heads * (a.qk_size + a.value_size)
    return queries + keys_and_values + n.heads * a.value_size * n.hidden_size


def _indexer(n: Numbers, i: Indexer, a: LatentAttention) -> int:
    return (a.q_rank or n.hidden_size) * i.heads * i.head_size + n.hidden_size * (i.head_size + i.heads)


def _delta_net(n: Numbers, d: DeltaNet) -> int:
    key, value = d.key_heads * d.key_size, d.value_heads * d.value_size
    return n.hidden_size * (2 * key + 2 * value + 2 * d.value_heads) + value * n.hidden_size


def _rest(n: Numbers) -> int:
    """Norms, biases, convolutions: all that is no matrix product."""
    per_softmax = 0
    if n.latent:
        per_softmax += n.latent.kv_rank + (n.latent.q_rank or 0)
    elif n.qk_norm:
        per_softmax += n.head_size * (n.heads + n.kv_groups if n.qk_norm_all_heads else 2)
    if n.qkv_bias:
        per_softmax += (n.heads + 2 * n.kv_groups) * n.head_size
    total = n.softmax_layers * per_softmax
    if n.indexer:
        total += n.indexer.layers * 2 * n.indexer.head_size
    if n.delta_net:
        d = n.delta_net
        channels = 2 * d.key_heads * d.key_size + d.value_heads * d.value_size
        total += (n.layers - n.softmax_layers) * (channels * d.conv_kernel + 2 * d.value_heads + d.value_size)
    return total + n.layers * n.norms_per_layer * n.hidden_size + n.hidden_size
