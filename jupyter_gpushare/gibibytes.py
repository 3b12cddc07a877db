"""Amounts of memory as every process writes them: in GiB, as the options for sizes have it."""

GIB = 1 << 30
TENTHS_BELOW = 9.95  # GiB; smaller amounts have one digit after the point


def gibibytes(count: int) -> str:
    """Return ``40 GiB`` for bytes, with one digit below ten.

    Names of GPUs have GB for the same unit: an H100-80GB has 80 times 2**30 bytes.
    """
    return _with(int(0 < count < TENTHS_BELOW * GIB), count)


def compared(*counts: int) -> tuple[str, ...]:
    """Return `gibibytes` of each, with as many more digits as make different amounts read differently.

    Amounts within 1/1000 GiB of each other may still read alike.
    """
    found = tuple(map(gibibytes, counts))
    for digits in (1, 2, 3):
        if len(set(found)) == len(set(counts)):
            break
        found = tuple(_with(digits, count) for count in counts)
    return found


def _with(digits: int, count: int) -> str:
    return f"{count / GIB:.{digits}f} GiB"
