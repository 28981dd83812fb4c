"""Record every weight version on disk before the engines load it (to upload, scan or count it):

    slime train --config demo.yaml --update-weight-mode delta \
        --custom-update-weight-post-write-path examples/hooks/weights_written.py
"""

import json
from pathlib import Path


def post_write(args, version_dir, rollout_engines):
    """Write one line per version to `weights.jsonl` in the run directory; an error ends the run."""
    files = sorted(Path(version_dir).glob("*.safetensors"))
    row = {
        "version": Path(version_dir).name,
        "files": [file.name for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        "engines": len(rollout_engines),
    }
    with (Path(args.run_dir) / "weights.jsonl").open("a") as out:
        out.write(json.dumps(row) + "\n")
