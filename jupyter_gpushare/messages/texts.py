"""Texts: a key of `TEMPLATES` with its arguments, and their English."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jupyter_gpushare.errors import fill
from jupyter_gpushare.messages.templates import TEMPLATES
from jupyter_gpushare.protocol.wire import Answer, Text
from jupyter_gpushare.wall_clock import clock_time

# Sentences in their order, joined with spaces.
Texts = tuple[Text, ...]


def text(key: str, *args: str | int | Text) -> Text:
    """Return the text of ``key`` with ``args`` for ``%1``, ``%2``, ...

    Raises:
        KeyError: `TEMPLATES` has no such key.
    """
    TEMPLATES[key]
    return Text(key=key, args=[each if isinstance(each, Text) else str(each) for each in args])


def english(texts: Text | Iterable[Text], time: Callable[[str], str] = clock_time) -> str:
    """Return the English of one text, or of several joined with spaces.

    ``time`` writes the times in it, by default in the zone of this process.
    """
    if not isinstance(texts, Text):
        return " ".join(english(each, time) for each in texts)
    template = TEMPLATES.get(texts.key, texts.key)  # the key of an error is its template
    args = [each if isinstance(each, str) else english(each, time) for each in texts.args]
    if texts.key == "time":
        return time(args[0])
    if isinstance(template, tuple):
        template = template[0] if args[0] == "1" else template[1]
    return fill(template, args)


def in_english(answer: object) -> object:
    """Return an answer for JSON, with the English of its ``sentence_texts`` as ``sentence``, and so on."""
    match answer:
        case list():
            return [in_english(each) for each in answer]
        case Answer() if not isinstance(answer, Text):
            plain = {name: getattr(answer, name) for name in answer.__struct_fields__}
            for name in plain:
                if not plain[name] and (texts := plain.get(f"{name}_texts")):
                    plain[name] = english(texts)
            return {name: in_english(value) for name, value in plain.items()}
        case _:
            return answer


def local(sentence: str, texts: Iterable[Text]) -> str:
    """Return a broker's sentence with its times in the zone of this process.

    It is the sentence as sent where the broker sent no texts, or a newer one sent unknown keys.
    """
    texts = tuple(texts)
    try:
        return english(texts) if texts and all(map(_is_known, texts)) else sentence
    except (IndexError, ValueError):  # other arguments than this version knows
        return sentence


def _is_known(told: Text) -> bool:
    return told.key in TEMPLATES and all(isinstance(each, str) or _is_known(each) for each in told.args)
