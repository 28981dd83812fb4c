"""MiniMax-M2 for the Megatron trainer: experts in every layer, chosen by sigmoid scores and a bias, and one norm over
all query heads, one over all key heads.

`megatron` reads the architecture and maps names, `full_width_norm` is the norm that Megatron-core lacks.
"""
