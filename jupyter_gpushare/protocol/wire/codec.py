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
    """Base of messages to the broker: unknown fields are errors."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base of messages from the broker: readers ignore unknown fields.

    A field such as ``size_texts`` has its English in ``size``, which is empty until the answer is sent
    (`messages.in_english`).
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
        InvalidRequest: the body is too long, not JSON, or not this kind of message.
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
    """Return the JSON of a message, which never contains NaN."""
    return msgspec.json.encode(message)


def encode_ascii(message: Any) -> str:
    """Return the JSON of a message in ASCII, for an environment variable in any locale."""
    return json.dumps(msgspec.to_builtins(message), separators=(",", ":"))


def digest(message: msgspec.Struct) -> str:
    """Return a digest of a message, 64 hexadecimal digits.

    The order of keys and fields with their default do not count, also in nested messages.  So a version
    with more fields returns the same digest.
    """
    return hashlib.sha256(msgspec.json.encode(_without_defaults(message), order="deterministic")).hexdigest()


def _without_defaults(value: object) -> object:
    match value:
        case msgspec.Struct():
            plain = {field.name: _default(field) for field in msgspec.structs.fields(value)}
            changed = {name: found for name in plain if (found := getattr(value, name)) != plain[name]}
            return {name: _without_defaults(found) for name, found in changed.items()}
        case list() | tuple():
            return [_without_defaults(each) for each in value]
        case dict():
            return {key: _without_defaults(each) for key, each in value.items()}
        case _:
            return value


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def decode_answer(body: bytes, kind: type[T]) -> T:
    """Return the broker's answer; fields that a newer broker added are ignored.

    Raises:
        BrokerUnavailable: it is not this kind of message, so another program answers at the address.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise BrokerUnavailable("the GPU broker sent an unexpected answer: %1", error) from None


def decode_stored(text: str, kind: type[T]) -> T:
    """Return a stored message.

    Raises:
        ValueError: the text is not the JSON of this kind of message.
    """
    return msgspec.json.decode(text, type=kind)


def indented(message: Any) -> str:
    """Return the JSON of a message with two spaces per level, for terminals."""
    return msgspec.json.format(encode(message), indent=2).decode()


def replace(message: S, **changes: Any) -> S:
    """Return a copy of ``message`` with changed fields.

    Raises:
        TypeError: the message has no such field.
    """
    return msgspec.structs.replace(message, **changes)


# ---- sentences as keys and arguments, which readers translate ----------------


class Text(Answer, frozen=True):
    """One sentence or phrase: a key of `messages.TEMPLATES`, and what replaces ``%1``, ``%2``, ...

    The key of an error is its English template.  The argument of the key ``time`` is a time (ISO 8601,
    UTC), which readers show in their own time zone, with seconds if it has them.
    """

    key: str
    args: list[str | Text] = []
