"""Sentences as keys and arguments say the same as their English text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jupyter_gpushare.messages import TEMPLATES, english, text
from jupyter_gpushare.protocol.wire import Text

GOLDEN = Path(__file__).parent / "golden"


def pairs(plain: Any) -> list[tuple[str, list[Text]]]:
    """Every English sentence in a message, with its texts."""
    if isinstance(plain, list):
        return [pair for each in plain for pair in pairs(each)]
    if not isinstance(plain, dict):
        return []
    found = [pair for value in plain.values() for pair in pairs(value)]
    for name, value in plain.items():
        if name.endswith("_texts") and value:
            found.append((plain[name.removesuffix("_texts")], msgspec.convert(value, list[Text])))
    return found


def test_texts_of_a_golden_message_are_its_sentences():
    for path in sorted(GOLDEN.glob("*.json")):
        for sentence, texts in pairs(json.loads(path.read_bytes())):
            assert english(texts, time=lambda at: at[11:16]) == sentence, path.name


def test_golden_messages_have_texts():
    assert len(pairs(json.loads((GOLDEN / "status_warned.json").read_bytes()))) >= 4


def test_a_template_numbers_its_arguments_from_one_without_a_gap():
    for key, template in TEMPLATES.items():
        for each in template if isinstance(template, tuple) else (template,):
            numbers = sorted({int(digit) for digit in re.findall(r"%(\d)", each)})
            assert numbers == list(range(1, len(numbers) + 1)), key


def test_english_puts_arguments_into_each_other():
    inner = text("range.about", text("duration.minutes", 5))
    assert english(text("job.ends_in", inner)) == "Ends in about 5 min."
    assert english(text("part.jobs_waiting", 1)) == "1 job is waiting"
    assert english(text("verbatim", "100 %1")) == "100 %1"


def test_an_unknown_key_is_an_error():
    with pytest.raises(KeyError):
        text("session.unknown")
