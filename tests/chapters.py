"""Read code blocks from the pages of docs/, so that a test runs what the page says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def block(page: str, chapter: str, language: str, number: int = 0) -> str:
    """Return a code block of a chapter (``## chapter``) of docs/``page``.md.

    ``number`` counts the blocks of ``language`` in the chapter, from 0.
    """
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {re.escape(chapter)}$(.*?)(?=^## |\Z)", text, re.M | re.S)
    found = re.findall(rf"^```{language}\n(.*?)^```$", body, re.M | re.S)
    assert len(found) > number, f"{page}.md has no such {language} block in {chapter}"
    return str(found[number])
