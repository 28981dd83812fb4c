"""Qwen3-Next for the Megatron trainer: three layers of gated linear attention to one of gated full attention, experts
with a shared one everywhere.

`megatron` reads the architecture and maps names, `linear_attention` is the module that Megatron-core lacks,
`delta_rule` its arithmetic.
"""
