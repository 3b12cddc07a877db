"""`Size`: the request of a lease, parsed from text and printed.

Text must be ASCII, because `Fraction` and `int` also read the digits of other scripts.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import NamedTuple

from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.gibibytes import gibibytes

WHOLE_GPU = 1000  # thousandths
MAX_GPUS = 1024
# Forms of text that `ui/src/sizes.ts` reads in the same way: a part of one GPU or a number of GPUs
# (this module checks its range), and bytes with or without a unit.
GPUS_PATTERN = "(?=.*[1-9])([0-9]{1,4}|0{0,4}[.][0-9]{1,20}|1[.]0{1,20})|[1-9][0-9]{0,6}/[1-9][0-9]{0,7}"
MEMORY_PATTERN = "([0-9]{1,15})([kKMGT]|[KMGT]i)?B?"
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_FACTORS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
_MIN_BYTES = 1 << 20
# The names that the driver prints (`nvidia-smi mig -lgip`).
_PROFILE = re.compile(r"([0-9]{1,2}c\.)?[0-9]{1,2}g\.[0-9]{1,4}gb(\+[a-z0-9.]{1,12})?")
# Thousandths that are printed as a fraction.
_COMMON = {250: "1/4", 333: "1/3", 500: "1/2", 666: "2/3", 750: "3/4"}


class Size(NamedTuple):
    """The request of a lease.

    ``device_count`` devices with ``fraction_milli`` of each (1000 for several),
    or ``memory_bytes`` of one device, or one MIG instance of ``profile``.  It is a tuple
    because the planner's caches use it as a key and need a fast hash.
    """

    fraction_milli: int = 0
    device_count: int = 1
    memory_bytes: int = 0
    profile: str = ""

    @classmethod
    def of_gpus(cls, text: str) -> Size:
        """Return the size of ``0.5``, ``1/4``, ``1`` or ``2`` GPUs.

        Raises:
            InvalidRequest: it is neither a fraction of one GPU nor a number from 1 to `MAX_GPUS`.
        """
        if text.isascii() and text.isdigit() and text.lstrip("0") not in ("", "1"):
            count = int(text) if len(text) <= 4 else 0
            if not 1 <= count <= MAX_GPUS:
                raise InvalidRequest("%1 GPUs are too many: at most %2", repr(text[:40]), MAX_GPUS)
            return cls(WHOLE_GPU, count)
        return cls(parse_fraction(text))

    @classmethod
    def of_memory(cls, text: str) -> Size:
        """Return the size of ``20GiB``, ``500MB`` or a plain number of bytes, of one device.

        Raises:
            InvalidRequest: it is not an amount of memory, or less than 1 MiB.
        """
        return cls(memory_bytes=parse_memory(text))

    @classmethod
    def of_profile(cls, text: str) -> Size:
        """Return the size of one MIG instance of a profile such as ``1g.10gb`` or ``1g.10gb+me``.

        Raises:
            InvalidRequest: it is not the name of a profile.
        """
        if not _PROFILE.fullmatch(text):
            raise InvalidRequest("%1 is not a MIG profile: write for example 1g.10gb", repr(text[:40]))
        return cls(WHOLE_GPU, profile=text)

    @property
    def text(self) -> str:
        """``1/2 GPU``, ``2 GPUs``, ``20 GiB of a GPU``, ``MIG 1g.10gb``."""
        if self.profile:
            return f"MIG {self.profile}"
        if self.memory_bytes:
            return f"{gibibytes(self.memory_bytes)} of a GPU"
        if self.device_count > 1:
            return f"{self.device_count} GPUs"
        return f"{fraction_text(self.fraction_milli)} GPU"


def fraction_text(milli: int) -> str:
    """Return ``1/2`` for common fractions, else ``0.123``."""
    return _COMMON.get(milli) or f"{milli / WHOLE_GPU:g}"


def memory_of_field(text: str) -> str:
    """Return ``20GiB`` for ``20`` from a field labelled GiB; leave text with a unit unchanged."""
    stem = text.strip()
    return f"{stem}GiB" if stem.isascii() and stem.replace(".", "", 1).isdigit() else stem


def field_of_memory(text: str) -> str:
    """Return the text in the field for a memory, such as ``20`` for ``20GiB`` (see `memory_of_field`)."""
    return text.removesuffix("GiB")


def parse_fraction(text: str) -> int:
    """Return the thousandths of one GPU for ``0.25``, ``1/4`` or ``1``, rounded down.

    ``1/3`` and ``0.33333`` are 333.

    Raises:
        InvalidRequest: it is not a number from 1/1000 to 1.
    """
    plain = text.strip()
    value = Fraction(plain) if re.fullmatch(GPUS_PATTERN, plain) else None
    if value is None or value > 1:
        raise InvalidRequest(
            "%1 is not a GPU fraction: write a part of one GPU like 0.5 or 1/2, or whole GPUs like 2",
            repr(text[:40]),
        )
    milli = math.floor(value * WHOLE_GPU)
    if milli < 1:
        raise InvalidRequest(
            "%1 is too small: a GPU fraction is a number like 0.5 or 1/2, from 0.001 to 1",
            repr(text[:40]),
        )
    return milli


def parse_memory(text: str) -> int:
    """Return the bytes of ``20GiB``, ``500MB`` or a plain number of bytes.

    Raises:
        InvalidRequest: it is not an amount of memory, or less than 1 MiB.
    """
    if (found := re.fullmatch(MEMORY_PATTERN, text.strip())) is None:
        raise InvalidRequest("%1 is not a size of memory: write for example 20GiB", repr(text[:40]))
    count = int(found[1]) * _FACTORS[(found[2] or "").upper()]
    if count < _MIN_BYTES:
        raise InvalidRequest(
            "%1 is too little GPU memory: write it with its unit, like 20GiB", repr(text[:40])
        )
    return count
