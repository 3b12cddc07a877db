"""All exceptions that this package raises on purpose.

GpuShareError
+-- RequestError        the caller can fix it: the text is shown to the user
|   +-- InvalidRequest      400  malformed or out of range
|   +-- NotAllowed          403  no rights on this project
|   +-- NotFound            404  no such lease, job or project (or another's)
|   +-- Conflict            409  not in a state where this is possible
|   +-- TooLarge            413  a body beyond the limit
|   +-- KeyReused           422  an Idempotency-Key of another request
|   +-- TooMany             429  a limit is reached: try later, or release something
|   +-- DiskFull            507  the broker's disk takes no change: try later
+-- BrokerUnavailable   503  the broker did not answer: callers retry, then degrade
|   +-- BrokerStopped           no process listens at its address
|   +-- NotSetUp                a setting of the site is wrong: the administrator must change it
+-- DeviceError         a driver call failed; has the call and its code
+-- HelperError         the device helper refused a request, or does not answer
+-- StoreError          the database cannot be used (newer, locked, broken)
    +-- Superseded              a newer broker uses the devices
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def fill(template: str, values: Sequence[str]) -> str:
    """Return ``template`` with ``values`` for ``%1``, ``%2``, ...

    Raises:
        IndexError: the template names more values than are given.
    """
    return re.sub(r"%(\d)", lambda found: values[int(found[1]) - 1], template)


class GpuShareError(Exception):
    """Base class: ``except GpuShareError`` catches all exceptions of this package and no others.

    ``template`` is the English text with ``%1``, ``%2``, ... for ``values``; pages translate it.
    """

    def __init__(self, template: str = "", *values: object) -> None:
        self.template, self.values = template, tuple(str(value) for value in values)
        super().__init__(fill(template, self.values) if values else template)


class RequestError(GpuShareError):
    """The request cannot be granted; the text is safe to show to the user.

    ``reason`` is a stable identifier that a program may branch on.
    """

    status = 400
    default_reason = "refused"

    def __init__(self, template: str, *values: object, reason: str = "") -> None:
        super().__init__(template, *values)
        self.reason = reason or self.default_reason


class InvalidRequest(RequestError):
    """A field is missing, malformed or out of range."""

    default_reason = "invalid"


class NotAllowed(RequestError):
    """The caller has no right to this project or verb."""

    status = 403
    default_reason = "not_allowed"


class NotFound(RequestError):
    """The lease, job or project does not exist, or belongs to another user."""

    status = 404
    default_reason = "not_found"


class Conflict(RequestError):
    """The lease, job or project is not in a state in which the request is possible."""

    status = 409
    default_reason = "conflict"


class TooLarge(RequestError):
    """The body is beyond the limit."""

    status = 413
    default_reason = "too_large"


class KeyReused(RequestError):
    """The Idempotency-Key belongs to an earlier request with another body."""

    status = 422
    default_reason = "key_reused"


class TooMany(RequestError):
    """A limit of the service is reached.

    ``retry_after_s`` is the number of seconds after which the request may succeed (the header Retry-After).
    """

    status = 429
    default_reason = "too_many"

    def __init__(self, template: str, *values: object, retry_after_s: float, reason: str = "") -> None:
        super().__init__(template, *values, reason=reason)
        self.retry_after_s = retry_after_s


DISK_FULL = (
    "The disk of the GPU service is full, so nothing can be changed now. What runs goes on; "
    "tell your administrator."
)


class DiskFull(RequestError):
    """The broker's disk is full: nothing is changed, and nothing that was accepted is lost."""

    status = 507
    default_reason = "disk_full"

    def __init__(self, template: str = DISK_FULL, *values: object, reason: str = "") -> None:
        super().__init__(template, *values, reason=reason)


class BrokerUnavailable(GpuShareError):
    """The broker did not answer; the caller retries, then continues without it."""

    status = 503


class BrokerStopped(BrokerUnavailable):
    """No process listens at the broker's address: it has ended, and is not being restarted."""


class NotSetUp(BrokerUnavailable):
    """A setting of the site keeps the caller from the broker; retries do not help until it is changed."""


class DeviceError(GpuShareError):
    """A driver call failed.

    ``code`` is the driver's own number, which can be looked up.
    """

    def __init__(self, call: str, code: int, name: str = "") -> None:
        super().__init__(f"{call} failed with code {code}" + (f" ({name})" if name else ""))
        self.call = call
        self.code = code
        self.name = name


class HelperError(GpuShareError):
    """The device helper refused a request or does not answer.

    ``kind`` is a stable identifier that a caller may branch on, such as ``stale_epoch``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class StoreError(GpuShareError):
    """The database cannot be opened, is in use, or has the schema of another version."""


class Superseded(StoreError):
    """A newer broker uses the same devices; this broker ends and must not be restarted."""
