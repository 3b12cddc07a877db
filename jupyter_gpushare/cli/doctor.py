"""The checks of ``gpushare doctor``: one `Check` per possible fault.

Each check is a pure function of collected facts; `CHECKS` has all of them.  ``ok`` means
correct, ``warn`` means that it works with weaker guarantees, and ``fail`` that it needs a
repair, which the advice names.

Inside a server of the Hub the checks see the same environment as that server's
kernels and terminals; elsewhere they cover this machine and the broker.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from jupyter_gpushare import procfs
from jupyter_gpushare.cli import checks
from jupyter_gpushare.cli.checks import Check, Found, Probe, fail, ok, warn
from jupyter_gpushare.cli.output import lending_text
from jupyter_gpushare.core.model import WHOLE_GPU
from jupyter_gpushare.errors import BrokerUnavailable, DeviceError, RequestError
from jupyter_gpushare.gpu.driver.known import MAINTENANCE, PERMISSION, PROGRAMS, note_of
from jupyter_gpushare.gpu.leases.files import (
    LIMIT_BYTES,
    LIMIT_DEVICE,
    LIMIT_HEAD,
    LIMIT_MAGIC,
    VERSION,
    PagePhase,
)
from jupyter_gpushare.gpu.os.memory import limit_bytes
from jupyter_gpushare.messages import LEVELS, gibibytes
from jupyter_gpushare.native import PRELOAD_NAME
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import clock_time

# ---- rights: the token, the user's projects and their guaranteed GPUs --------

_SETTING = "GPUSHARE_API_TOKEN (or give --token)"


def no_token(environment: Mapping[str, str]) -> Check:
    """Return the fault that no token is known; the advice is where to get one."""
    advice = "make one on the Hub's token page, with the scope access:services!service=gpushare, and set "
    if "JUPYTERHUB_USER" in environment:
        advice = "restart this server: the Hub gives it a token; else "
    return fail("No token is known here, so nothing but health can be asked.", advice + _SETTING)


def check_refusal(error: RequestError) -> Check:
    """Return the fault that the broker or the Hub refused the token."""
    advice = (
        "use a token with the scope access:services!service=gpushare; the administrator gives users that "
    )
    advice += "scope by c.JupyterHub.extra_user_scopes (docs/admin.md, 3)"
    if error.reason == "login":  # the Hub does not know it
        advice = "it has expired or was revoked: restart this server, or make a new one on the Hub's token "
        advice += f"page and set {_SETTING}"
    return fail(f"{str(error).rstrip('.')}.", advice)


def check_projects(status: wire.Status, devices: wire.Devices) -> Check:
    """Return whether the user may use GPUs, and whether the machine has the GPUs guaranteed to projects."""
    if not status.projects:
        message = f"{status.user} belongs to no project that may use GPUs."
        advice = "the administrator adds the user to a Hub group of a project in c.GPUShareBroker.projects"
        return fail(message, advice)
    names = ", ".join(project.name for project in status.projects)
    guaranteed = devices.guaranteed_milli / WHOLE_GPU
    if devices.devices and guaranteed > len(devices.devices):
        message = (
            f"Projects are guaranteed {guaranteed:g} GPUs together; this machine has {len(devices.devices)}."
        )
        advice = "the administrator lowers the quotas (`gpushare admin quota`, c.GPUShareBroker.projects)"
        return warn(message, advice)
    return ok(f"You may use the GPUs of {names}.")


# ---- checks ------------------------------------------------------------------

# Diagnostics report the current state, so the wait for a broker that restarts is short.
RETRY_S = 1.0
_DRIVER_SETTINGS = "/proc/driver/nvidia/params"

# How the watchdog treats a process that evades the library (`gpushare helper --watchdog`).
WATCHDOG = {
    "stop": "a watchdog stops processes that evade it",
    "warn": "a watchdog reports processes that evade it and stops none",
    "off": "no watchdog looks for processes that evade it",
}


class BrokerAnswers(NamedTuple):
    """The broker's answers about the user and the machine."""

    status: wire.Status
    devices: wire.Devices
    lending: wire.Lending


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFacts:
    """The facts that the checks examine."""

    environment: Mapping[str, str]
    broker: Check
    token: Found = ()
    answers: BrokerAnswers | None = None  # None if the broker did not answer

    @property
    def simulated(self) -> bool:
        """Return whether the broker's devices are simulated."""
        return self.answers is not None and self.answers.devices.simulated

    @property
    def lease(self) -> wire.LeaseStatus | None:
        """Return the lease of this environment, which may add the number of the start (``-3``) to its id."""
        wanted = self.environment.get("GPUSHARE_LEASE", "")
        names = {wanted, wanted.rpartition("-")[0]} - {""}
        leases = self.answers.status.leases if self.answers else ()
        return next((lease for lease in leases if lease.id in names), None)


def examine(url: str, token: str, environment: Mapping[str, str]) -> list[Check]:
    """Run all checks now and return them; ``url`` is the base of the broker's API, or empty."""
    facts = _facts(url, token, environment)
    if facts.lease is None and not environment.get("GPUSHARE_MEMORY_LIMIT"):
        # The variable names a lease that this server may get later.
        without = {name: value for name, value in environment.items() if name != "GPUSHARE_LEASE"}
        facts = replace(facts, environment=without)
    unreadable = "run doctor as a user who may examine this"
    return asyncio.run(checks.examine(CHECKS, facts, unreadable=unreadable))


# ---- the broker --------------------------------------------------------------


def _facts(url: str, token: str, environment: Mapping[str, str]) -> DoctorFacts:
    from jupyter_gpushare.channel import CERTIFICATE_VARIABLE, api_url
    from jupyter_gpushare.client import BlockingClient

    if not url:
        advice = "set GPUSHARE_API_URL (servers of the Hub have it), or give --url"
        return DoctorFacts(environment=environment, broker=fail("No broker address is known here.", advice))
    certificate = os.environ.get(CERTIFICATE_VARIABLE, "")
    try:
        client = BlockingClient(api_url(url), token, certificate=certificate, retry_s=RETRY_S)
    except RequestError as error:
        broker = fail(_sentence(str(error)), "give another --url")
        return DoctorFacts(environment=environment, broker=broker)
    with closing(client):
        try:
            broker = check_health(client.get("health", wire.Health))
        except (BrokerUnavailable, RequestError) as error:
            broker = fail(f"{_sentence(str(error))} ({url})", "tell the administrator")
        facts = DoctorFacts(environment=environment, broker=broker)
        if not token:
            return replace(facts, token=no_token(os.environ))
        try:
            status = client.get("status", wire.Status)
            devices = client.get("devices", wire.Devices)
            lending = client.get("lending", wire.Lending)
        except RequestError as error:
            return replace(facts, token=check_refusal(error))
        except BrokerUnavailable:
            return facts
    known = ok(f"The broker knows you as {status.user}.")
    return replace(facts, token=known, answers=BrokerAnswers(status, devices, lending))


def check_health(health: wire.Health) -> Check:
    """Return whether the broker's own health report is ``ok``."""
    if health.status == "ok" and not health.sockets_inherited:
        message = f"Version {health.version} answers. It bound its port itself: others can while it restarts."
        return warn(message, "run it by gpushare-broker.socket of systemd, or with --respawn")
    if health.status == "ok":
        return ok(f"Version {health.version} answers.")
    advice = "the administrator finds more in the broker's log"
    return warn(" ".join(health.reasons) or "It says that it is degraded.", advice)


def check_devices(status: wire.Status, devices: wire.Devices) -> Check:
    """Return whether the device helper answers and its devices are healthy."""
    if not status.devices_known:
        return fail("The device helper does not answer the broker.", "the administrator restarts it")
    left_out = "".join(f" {reason}." for reason in devices.left_out)
    if not devices.devices:
        message = f"The device helper found no device.{left_out}"
        return fail(message, "check `nvidia-smi` on the GPU machine")
    broken = [d for d in devices.devices if not d.healthy]
    if broken:
        message = "; ".join(f"{d.name} ({d.uuid}): {d.reason or 'not healthy'}" for d in broken)
        return fail(message, "the administrator takes it out of service or resets it")
    stuck = [d for d in devices.devices if not d.suspendable]
    kind = "simulated devices" if devices.simulated else "devices"
    message = f"{len(devices.devices)} {kind}, driver {devices.driver}.{left_out}"
    if left_out:
        return warn(message, "the others work; see docs/isolation.md, Devices in trouble")
    if stuck:
        why = stuck[0].suspend_reason or "the driver's checkpoint did not pass its test"
        advice = "idle sessions keep their GPU there; driver r575 or later is needed to put them to sleep"
        return warn(f"{message} {len(stuck)} cannot put sessions to sleep: {why}.", advice)
    return ok(message)


def check_moves(devices: wire.Devices) -> Found:
    """Return whether sleeping sessions can resume on another device; nothing if none can sleep."""
    able = [d for d in devices.devices if d.suspendable]
    fixed = [d for d in able if not d.movable]
    if not able:
        return ()
    if not fixed:
        return ok("What sleeps can resume on another GPU of the same model.")
    message = f"What sleeps on {len(fixed)} of {len(able)} can resume on its own GPU alone"
    return ok(f"{message}: {fixed[0].move_reason or 'no move was tested'}.")


def check_lending(lending: wire.Lending) -> Check:
    """Return whether GPUs are lent, and how often a suspension failed on this machine."""
    text = f"{lending.mode}: {lending_text(lending)}"
    if lending.lost:
        advice = "see docs/isolation.md, Drivers; `gpushare admin lending off` wakes all and lends nothing"
        return warn(text, advice)
    return ok(text)


def check_programs(_driver: str) -> Check:
    """Return the programs that a real driver does not limit or suspend."""
    programs = "; ".join(f"{each.programs}: {each.note} ({each.source})" for each in PROGRAMS)
    return ok(f"{programs}.")


def check_published(driver: str) -> Found:
    """Return the published limits of this driver for suspending sessions; nothing if none are known."""
    note = note_of(driver)
    if note is None:
        return ()
    message = f"Driver {driver}: {note.note} ({note.source})."
    if note.is_warning:
        return warn(message, "see docs/isolation.md, Drivers, before sessions are put to sleep there")
    return ok(message)


def check_ladders(devices: wire.Devices) -> list[Check]:
    """Return the levels of enforcement on each device, strongest first, and why some are not offered."""
    found = []
    for device in devices.devices:
        message = f"{device.name} ({device.uuid}): {'; '.join(map(_rung, device.ladder))}."
        if device.ladder and device.level == "hints":
            advice = (
                "a part of this device is a request only; see docs/isolation.md for what each level needs"
            )
            found.append(warn(message, advice))
        elif device.ladder:
            found.append(ok(message))
    return found


def _rung(rung: wire.Rung) -> str:
    if not rung.offered:
        return f"{rung.level}: no, {rung.reason}"
    return f"{rung.level}: yes" + (f", by {rung.by}" if rung.by else "")


# ---- this machine ------------------------------------------------------------


def _driver() -> str:
    """Return ``<version>: <names>`` of the driver that this process finds, or ``!`` and the error."""
    try:
        from jupyter_gpushare.gpu.driver.denied import without_persistence
        from jupyter_gpushare.gpu.driver.nvml import Nvml

        nvml = Nvml()
        off = without_persistence(nvml, [gpu.uuid for gpu in nvml.gpus])
    except DeviceError as error:
        return f"!{error}"
    names = [gpu.name + (" (persistence mode off)" if gpu.uuid in off else "") for gpu in nvml.gpus]
    found = [*names, *nvml.left_out]
    return f"{nvml.driver}: {', '.join(found) or 'no device'}"


def check_driver(found: str, simulated: bool, options: str = "") -> Check:
    """Return whether this process finds a driver.

    ``found`` is the result of `_driver`; ``options`` are those of the simulated driver.
    """
    if not found.startswith("!"):
        relaxed = simulated and "checkpoint=any-uid" in options
        rule = "; it lets every user suspend processes, a real one only root" if relaxed else ""
        return ok(found + rule)
    advice = "start a server with a GPU, or install the NVIDIA driver on this machine"
    if simulated:
        advice = "the simulated driver is found by servers with a GPU only; start one"
    if "GPUSHARE_SIMULATE is wrong" in found:
        advice = "correct GPUSHARE_SIMULATE, and restart what makes the simulated devices"
    return warn(f"No driver is found by this process: {found[1:]}.", advice)


def check_scrubbing(params: str | None, simulated: bool) -> Check:
    """Return whether the driver erases memory between processes (a parameter of its kernel module)."""
    if params is None:
        if simulated:
            return ok("Simulated devices start every allocation erased.")
        return warn(
            f"Unknown whether freed memory is erased: {_DRIVER_SETTINGS} cannot be read.",
            "run doctor on the GPU machine itself",
        )
    set_to = re.search(r"RmDisableScrubOnFree\s*[=:]\s*(\w+)", params, re.IGNORECASE)
    if set_to is None or set_to[1] in ("0", "0x0"):
        return ok("The driver erases freed memory before another process gets it.")
    return fail(
        "The driver is told not to erase freed memory: one user may read another's data.",
        "remove RMDisableScrubOnFree from the options of the nvidia kernel module and reload it",
    )


def check_device_files(params: str | None, devices: wire.Devices | None) -> Found:
    """Return whether only users of leases can open whole GPUs, and whether the driver may change that."""
    rungs = [
        rung
        for device in (devices.devices if devices else ())
        for rung in device.ladder
        if rung.level == "whole_gpu" and (rung.by or "open to every user" in rung.reason)
    ]
    if not rungs:
        return ()
    if is_open := [rung.reason for rung in rungs if not rung.offered]:
        advice = "start the device helper with --own-device-files (docs/isolation.md, Device files)"
        return warn(f"Whole GPUs are not enforced: {'; '.join(is_open)}.", advice)
    modifies = re.search(r"ModifyDeviceFiles\s*[=:]\s*(\w+)", params or "")
    if modifies is None or modifies[1] in ("0", "0x0"):
        return ok(f"Closed to users without a lease by {rungs[0].by}.")
    return warn(
        f"Closed to users without a lease by {rungs[0].by}, but the driver may open them for a moment.",
        "set NVreg_ModifyDeviceFiles=0 in the options of the nvidia kernel module, and make the "
        "files at boot (docs/isolation.md, Device files)",
    )


def check_origin(environment: Mapping[str, str]) -> Check:
    """Return whether pages of one user's server can reach those of another in a browser."""
    if "JUPYTERHUB_API_URL" not in environment:
        return ok("This is not a server of a Hub.")
    # The Hub's callback has a host only with subdomains.
    if urlsplit(environment.get("JUPYTERHUB_OAUTH_CALLBACK_URL", "")).netloc:
        return ok("Each user's server has a host name of its own.")
    return warn(
        "All users' servers are one origin: a page of one can act in a window that it opened for another.",
        "where users are not trusted, set c.JupyterHub.subdomain_host (docs/security.md)",
    )


def check_memory_limit(environment: Mapping[str, str], maximum_bytes: int | None) -> Check:
    """Return whether the host memory of a server is limited; its cgroups allow ``maximum_bytes``."""
    if "JUPYTERHUB_USER" not in environment:
        return ok("This is not a server of a Hub.")
    if maximum_bytes is not None:
        return ok(f"This server is limited to {gibibytes(maximum_bytes)}.")
    return warn(
        "This server's memory is not limited: it can take all of its machine.",
        "the administrator sets c.LimitedProcesses.cgroup_root and c.Spawner.mem_limit (docs/isolation.md)",
    )


def check_environment(environment: Mapping[str, str], lease: wire.LeaseStatus | None) -> Check:
    """Return whether the environment variables of a lease are complete and consistent."""
    lease_id = environment.get("GPUSHARE_LEASE", "")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not lease_id:
        if "JUPYTERHUB_USER" in environment and visible:
            advice = "unset CUDA_VISIBLE_DEVICES; pick a GPU when starting the server instead"
            return warn("This server has no GPU, yet CUDA_VISIBLE_DEVICES names one.", advice)
        return ok("No GPU is held here.")
    if not environment.get("GPUSHARE_MEMORY_LIMIT"):
        advice = "open a new terminal"
        return warn("This server got its GPU after this terminal was opened.", advice)
    if not environment.get("GPUSHARE_LEASE_DIR"):
        advice = "restart the server: the Hub sets this variable, and nothing should change it"
        return fail("A GPU is held, but GPUSHARE_LEASE_DIR is not set.", advice)
    if lease is None:
        return warn(f"The broker did not confirm the lease {lease_id}.", "see the checks of broker and token")
    if visible is not None and not _names_device(visible, lease.devices):
        advice = "unset it, or count from 0: numbers are those of the lease's own devices"
        return warn(f"Programs see no GPU: CUDA_VISIBLE_DEVICES is {visible[:100]!r}.", advice)
    return ok(f"Lease {lease_id}, {lease.size} on {lease.device_name}.")


def _names_device(visible: str, devices: Sequence[str]) -> bool:
    """Return whether the first entry is a device of a lease; if not, programs see no device."""
    first = visible.partition(",")[0]
    if number := re.match(r"\s*\+?(\d{1,3})", first):
        return int(number[1]) < len(devices)
    return len(first) >= len("GPU-") and sum(device.startswith(first) for device in devices) == 1


def check_preload(environment: Mapping[str, str], maps: str | None) -> Check:
    """Return whether LD_PRELOAD names the library that enforces the limit, and this process has loaded it."""
    advice = "restart the server, and do not unset or replace LD_PRELOAD"
    if PRELOAD_NAME not in environment.get("LD_PRELOAD", ""):
        return fail(f"LD_PRELOAD does not name {PRELOAD_NAME}.", advice)
    if maps is not None and "/ld-musl-" in maps:
        advice = "use an image with glibc (Debian, Ubuntu, Red Hat): NVIDIA's driver needs it too"
        return fail("The C library of this program is musl: it gets no GPU memory.", advice)
    if maps is not None and PRELOAD_NAME not in maps:
        return fail(f"{PRELOAD_NAME} is named in LD_PRELOAD but was not loaded.", advice)
    return ok(f"{PRELOAD_NAME} is loaded in this process.")


def check_limit_page(path: Path, lease: wire.LeaseStatus | None) -> Check:
    """Return whether the limit page is readable and valid, and matches the lease."""
    advice = "restart the server; without a limit every allocation is denied"
    try:
        page = path.read_bytes()[:LIMIT_BYTES]
    except OSError as error:
        return fail(f"The limit page {path} cannot be read ({error.strerror}).", advice)
    if len(page) < LIMIT_BYTES or LIMIT_HEAD.unpack_from(page)[:2] != (LIMIT_MAGIC, VERSION):
        return fail(f"The limit page {path} is not one of this version.", advice)
    _, _, count, _, _, phase, _ = LIMIT_HEAD.unpack_from(page)
    if phase == PagePhase.REVOKED:
        return fail("The lease has ended: every allocation is denied.", advice)
    limits = [
        LIMIT_DEVICE.unpack_from(page, LIMIT_HEAD.size + i * LIMIT_DEVICE.size)[1] for i in range(count)
    ]
    total = sum(limits)
    if lease is not None and lease.memory_limit_bytes and total != lease.memory_limit_bytes:
        message = f"The limit page says {gibibytes(total)}, the broker {gibibytes(lease.memory_limit_bytes)}."
        return warn(message, "run doctor again; if it stays, tell the administrator")
    if os.access(path, os.W_OK):
        message = f"{gibibytes(total)}, in a page that this user could change."
        return warn(message, "fine for a demo; in production the device helper runs as another user")
    return ok(f"{gibibytes(total)} on {count} device{'s' if count != 1 else ''}.")


def check_level(lease: wire.LeaseStatus, watchdog: str) -> Check:
    """Return how the memory limit is enforced, and how the watchdog treats processes that evade it."""
    message = LEVELS.get(lease.level, lease.level)
    if lease.level == "preload":
        message += f"; {WATCHDOG[watchdog]}"
        if watchdog == "off":
            advice = "an administrator starts the device helper with --watchdog warn or stop"
            return warn(f"preload: {message}.", advice)
    if lease.level == "hints":
        return warn(f"hints: {message}.", "an administrator can offer MIG instances or the preload library")
    return ok(f"{lease.level}: {message}.")


def check_culling(lease: wire.LeaseStatus) -> Found:
    """Return what may end this session if it stays idle, asleep or not; nothing if that is not known."""
    if not lease.ends_by:
        return ()
    when = f"after {clock_time(lease.ends_at)}" if lease.ends_at else "some time"
    return warn(
        f"{lease.ends_by} may end this session or a kernel of it {when}; its variables are lost then.",
        "save what you need before; the site sets the time (docs/beside.md)",
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _read(path: str) -> str | None:
    """Return the first 4 MiB of a system file; None if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4 << 20)
    except OSError:
        return None


# ---- all checks --------------------------------------------------------------


def _answered(probe: Callable[[BrokerAnswers], Found]) -> Probe[DoctorFacts]:
    return lambda facts: probe(facts.answers) if facts.answers else ()


def _real(probe: Callable[[str], Found]) -> Probe[DoctorFacts]:
    return _answered(lambda found: () if found.devices.simulated else probe(found.devices.driver))


def _preload(facts: DoctorFacts) -> Found:
    if facts.lease is not None and facts.lease.level != "preload":
        return ()
    return check_preload(facts.environment, _read(procfs.path(0, "maps")))


def _limit(facts: DoctorFacts) -> Check:
    folder = facts.environment.get("GPUSHARE_LEASE_DIR", "/nonexistent")
    return check_limit_page(Path(folder, "limit"), facts.lease)


def _held(probe: Callable[[DoctorFacts], Found]) -> Probe[DoctorFacts]:
    return lambda facts: probe(facts) if facts.environment.get("GPUSHARE_LEASE") else ()


def _leased(probe: Callable[[wire.LeaseStatus, str], Found]) -> Probe[DoctorFacts]:
    return lambda facts: (
        probe(facts.lease, facts.answers.devices.watchdog) if facts.lease and facts.answers else ()
    )


CHECKS: dict[str, Probe[DoctorFacts]] = {
    "broker": lambda facts: facts.broker,
    "token": lambda facts: facts.token,
    "devices": _answered(lambda found: check_devices(found.status, found.devices)),
    "moves": _answered(lambda found: check_moves(found.devices)),
    "suspension": _real(check_published),
    "permission": _real(lambda _: ok(PERMISSION)),
    "programs": _real(check_programs),
    "maintenance": _real(lambda _: ok(MAINTENANCE)),
    "enforcement": _answered(lambda found: check_ladders(found.devices)),
    "lending": _answered(lambda found: check_lending(found.lending)),
    "projects": _answered(lambda found: check_projects(found.status, found.devices)),
    "driver": lambda facts: check_driver(
        _driver(), facts.simulated, facts.environment.get("GPUSHARE_SIMULATE", "")
    ),
    "scrubbing": lambda facts: check_scrubbing(_read(_DRIVER_SETTINGS), facts.simulated),
    "device files": lambda facts: check_device_files(
        _read(_DRIVER_SETTINGS), facts.answers.devices if facts.answers else None
    ),
    "environment": lambda facts: check_environment(facts.environment, facts.lease),
    "origin": lambda facts: check_origin(facts.environment),
    "host memory": lambda facts: check_memory_limit(facts.environment, limit_bytes(0)),
    "preload": _held(_preload),
    "limit": _held(_limit),
    "culling": _leased(lambda lease, _: check_culling(lease)),
    "level": _leased(check_level),
}
