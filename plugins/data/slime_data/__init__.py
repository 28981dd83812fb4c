"""Data beyond JSONL with the columns of slime: other files, columns and sources, and prompts with images and tools.

The core finds them by entry points: `slime.api`, `slime.data` (`slime_core.data.rows`) and `slime.signatures`
(`slime_core.plugins.resolve`).
"""
