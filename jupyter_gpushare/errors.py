"""Every exception this package raises on purpose.

GpuShareError
+-- RequestError        the caller can fix it: the text is shown to the user
|   +-- InvalidRequest      400  malformed or out of range
|   +-- NotAllowed          403  no rights on this project
|   +-- NotFound            404  no such lease, job or project (or another's)
|   +-- Conflict            409  not in a state where this is possible
|   +-- TooMany             429  a bound is reached: try later, or release something
+-- BrokerUnavailable   503  the broker did not answer: callers retry, then degrade
+-- DeviceError         the driver said no; carries its call and code
+-- HelperError         the device helper refused, or is not there
+-- StoreError          the database cannot be used (newer, locked, broken)
"""

from __future__ import annotations


class GpuShareError(Exception):
    """Base class: ``except GpuShareError`` catches all of ours and nothing else."""


class RequestError(GpuShareError):
    """The request cannot be granted; the text is safe to show to the user.

    ``reason`` is a stable word that a program may branch on.
    """

    status = 400
    default_reason = "refused"

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or self.default_reason


class InvalidRequest(RequestError):
    """A field is missing, malformed or out of range."""

    default_reason = "invalid"


class NotAllowed(RequestError):
    """The caller has no right to this project or verb."""

    status = 403
    default_reason = "not_allowed"


class NotFound(RequestError):
    """There is no such thing, or it belongs to somebody else."""

    status = 404
    default_reason = "not_found"


class Conflict(RequestError):
    """The thing exists but is not in a state where this is possible."""

    status = 409
    default_reason = "conflict"


class TooMany(RequestError):
    """A bound of the service is reached.

    ``retry_after_s``: when it will not be any more; None: that depends on the caller.
    """

    status = 429
    default_reason = "too_many"

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class BrokerUnavailable(GpuShareError):
    """The broker did not answer; the caller retries, then goes on without it."""

    status = 503


class DeviceError(GpuShareError):
    """A driver call failed.

    ``code`` is the driver's own number, so that a log line can be searched for.
    """

    def __init__(self, call: str, code: int, name: str = "") -> None:
        super().__init__(f"{call} failed with code {code}" + (f" ({name})" if name else ""))
        self.call = call
        self.code = code
        self.name = name


class HelperError(GpuShareError):
    """The device helper refused a request or does not answer.

    ``kind`` is a stable word a caller may branch on, for example ``stale_epoch``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class StoreError(GpuShareError):
    """The database cannot be opened, is in use, or comes from a newer version."""
