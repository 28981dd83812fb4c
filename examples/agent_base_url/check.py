"""The test of the agent's work: the share of its answer that is digits, printed as the last number."""

from pathlib import Path

path = Path("answer.txt")
answer = path.read_text(encoding="utf-8") if path.exists() else ""
print(sum(character.isdigit() for character in answer) / max(len(answer), 8))
