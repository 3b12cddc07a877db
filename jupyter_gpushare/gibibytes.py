"""Amounts of memory in the form that all processes use: in GiB, like the options for sizes."""

GIB = 1 << 30
TENTHS_BELOW = 9.95  # GiB; smaller amounts have one digit after the point


def gibibytes(count: int) -> str:
    """Return a number of bytes as ``40 GiB``, with one digit after the point below 10 GiB.

    Names of GPUs use GB for the same unit: an H100-80GB has 80 times 2**30 bytes.
    """
    return _with(int(0 < count < TENTHS_BELOW * GIB), count)


def compared(*counts: int) -> tuple[str, ...]:
    """Return `gibibytes` of each count, with more digits if different amounts would look the same.

    Amounts within 1/1000 GiB of each other may still look the same.
    """
    found = tuple(map(gibibytes, counts))
    for digits in (1, 2, 3):
        if len(set(found)) == len(set(counts)):
            break
        found = tuple(_with(digits, count) for count in counts)
    return found


def _with(digits: int, count: int) -> str:
    return f"{count / GIB:.{digits}f} GiB"
