"""The messages that troubleshooting.md quotes are messages of this toolkit, word for word."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_GAP = "\0"


def messages() -> list[str]:
    """Every string of the package, with a mark where an f-string has a value."""
    found = []
    for file in (ROOT / "src" / "flow_factory").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else _GAP for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def quoted() -> list[str]:
    text = " ".join((ROOT / "guidance" / "troubleshooting.md").read_text().split())
    return re.findall(r"says\s+`([^`]+)`", text)


def test_quoted_messages_exist() -> None:
    """Each piece between two gaps stands in one message of the code, in order."""
    known = messages()
    assert len(quoted()) >= 15
    for quote in quoted():
        pieces = [piece.strip() for piece in quote.split("…") if piece.strip()]
        pattern = re.compile(".*?".join(map(re.escape, pieces)), re.DOTALL)
        assert any(pattern.search(message) for message in known), f"no message says {quote!r}"
