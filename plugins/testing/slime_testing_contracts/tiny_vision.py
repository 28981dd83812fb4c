"""Tiny random vision-language models with tokenizer and processor, and images for them: inputs of tests.

Used by the tests of families with images. The LLaVA is for tests without a server, since its images are few tokens; the
Qwen2-VL is for tests in which SGLang serves it.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

_KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Directories that are removed when the process ends."""
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE_TOKENS = 4
"""Number of tokens of an image: 16 x 16 pixels, patches of 8."""


@functools.cache
def tiny_vision_model() -> Path:
    """Return an HF-layout directory of a LLaVA with about 50k random parameters, always the same."""
    import torch
    from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    kept = _directory()
    tokenizer = _tokenizer("<image>", "<image>")
    clip: Any = CLIPImageProcessorPil
    images = clip(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    build: Any = LlavaProcessor
    build(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(kept)  # fmt: skip
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "num_key_value_heads": 2, "head_dim": 8, **_SIZES}
    vision = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 32, **_SIZES}
    config: Any = LlavaConfig
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(
            config(
                text_config={**text, "max_position_embeddings": 256, "eos_token_id": tokenizer.eos_token_id},
                vision_config=vision,
                image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
                vision_feature_layer=-1,
            )
        )
        for parameter in model.parameters():  # biases and norms start at constants that hide mistakes
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(kept)
    return kept


@functools.cache
def tiny_qwen2_vl() -> Path:
    """Return an HF-layout directory of a Qwen2-VL with about 100k random parameters, which samples no image tokens."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessorPil

    kept = _directory()
    marks = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    tokenizer = _tokenizer("".join(marks[:3]), *marks)
    tokenizer.save_pretrained(kept)
    # SGLang's own least and largest size, and a key of published models that transformers does not write.
    images: Any = Qwen2VLImageProcessorPil
    images(size={"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28}).save_pretrained(kept)
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(marks))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "rope_parameters": rope, **_SIZES}
    vision = {"depth": 2, "num_heads": 4, "patch_size": 14, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    config: Any = Qwen2VLConfig
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen2VLForConditionalGeneration(
            config(
                text_config={
                    **text, "max_position_embeddings": 256, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None
                },
                vision_config={**vision, "in_chans": 3}, image_token_id=image, video_token_id=video,
                vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=False,
            )
        )  # fmt: skip
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
        head = model.lm_head.weight
        head.mul_(5)
        head[[start, image, end, video]] = 0
    model.save_pretrained(kept)
    return kept


def _directory() -> Path:
    kept = tempfile.TemporaryDirectory(prefix="slime-tiny-vision-")
    _KEPT.append(kept)
    return Path(kept.name)


def _tokenizer(image: str, *marks: str) -> Any:
    """Return a tokenizer with a token per byte, the template's tokens, and `marks`; an image in a chat is `image`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    level: Any = pre_tokenizers.ByteLevel
    inner: Any = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(level.alphabet()))}, merges=[]))
    inner.pre_tokenizer, inner.decoder = level(add_prefix_space=False), decoders.ByteLevel()
    build: Any = PreTrainedTokenizerFast
    found = build(
        tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", *marks],
    )  # fmt: skip
    found.chat_template = _TEMPLATE.replace("<image>", image)
    return found


def write_image(path: Path, seed: int) -> Path:
    """Write a PNG of 20 x 30 random pixels, and return its path."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path
