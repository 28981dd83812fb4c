"""MiMo-7B: Qwen2's decoder, and layers for multi-token prediction that are carried, not trained."""
