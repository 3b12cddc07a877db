"""JSON encoding of messages: strict towards senders, tolerant towards newer brokers."""

from __future__ import annotations

import hashlib
import json
from typing import Any, TypeVar

import msgspec

from jupyter_gpushare.errors import BrokerUnavailable, InvalidRequest

MAX_BODY_BYTES = 1 << 20
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what comes in: unknown fields are errors."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what goes out: readers ignore fields they do not know.

    A field such as ``size_texts`` has ``size`` beside it: its English, which is empty until the
    answer is sent (`messages.in_english`).
    """


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidRequest("the key %1 occurs twice", repr(key[:40]))
        found[key] = value
    return found


def _no_constant(text: str) -> Any:
    raise InvalidRequest("%1 is not a number in JSON", text)


def decode(body: bytes, kind: type[T]) -> T:
    """Return the message in a request's body.

    Raises:
        InvalidRequest: too long, not JSON, or not of this shape.
    """
    if len(body) > MAX_BODY_BYTES:
        raise InvalidRequest("the body has %1 bytes; at most %2 are read", len(body), MAX_BODY_BYTES)
    try:
        plain = json.loads(body, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest("not a valid %1: %2", kind.__name__, error) from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is not JSON: %1", error) from None


def encode(message: Any) -> bytes:
    """Return the JSON of a message (NaN cannot occur in one)."""
    return msgspec.json.encode(message)


def encode_ascii(message: Any) -> str:
    """Return the JSON of a message in ASCII, for an environment whatever the locale is."""
    return json.dumps(msgspec.to_builtins(message), separators=(",", ":"))


def digest(message: msgspec.Struct) -> str:
    """Return 64 hexadecimal digits of what a message says; the order of keys and default values do not count.

    So it stays the same in a version with more fields, in messages inside it as well.
    """
    return hashlib.sha256(msgspec.json.encode(_said(message), order="deterministic")).hexdigest()


def _said(value: object) -> object:
    match value:
        case msgspec.Struct():
            plain = {field.name: _default(field) for field in msgspec.structs.fields(value)}
            changed = {name: said for name in plain if (said := getattr(value, name)) != plain[name]}
            return {name: _said(said) for name, said in changed.items()}
        case list() | tuple():
            return [_said(each) for each in value]
        case dict():
            return {key: _said(each) for key, each in value.items()}
        case _:
            return value


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def decode_answer(body: bytes, kind: type[T]) -> T:
    """Return the broker's answer; fields that a newer broker added are ignored.

    Raises:
        BrokerUnavailable: not an answer of this shape, so another program answers at its address.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise BrokerUnavailable("the GPU broker sent an unexpected answer: %1", error) from None


def decode_stored(text: str, kind: type[T]) -> T:
    """Return a stored message.

    Raises:
        ValueError: not JSON of this shape.
    """
    return msgspec.json.decode(text, type=kind)


def indented(message: Any) -> str:
    """Return the JSON of a message with two spaces per level, for terminals."""
    return msgspec.json.format(encode(message), indent=2).decode()


def replace(message: S, **changes: Any) -> S:
    """Return a copy of ``message`` with other values in the named fields.

    Raises:
        TypeError: the message has no such field.
    """
    return msgspec.structs.replace(message, **changes)


# ---- sentences as keys and arguments, which readers translate ----------------


class Text(Answer, frozen=True):
    """One sentence or phrase: a key of `messages.TEMPLATES`, and what replaces ``%1``, ``%2``, ...

    The key of an error is its English template.  The argument of the key ``time`` is a moment
    (ISO 8601, UTC), which readers write in their own zone, with seconds where it has them.
    """

    key: str
    args: list[str | Text] = []
