"""Requests for training jobs: their checks, their lease, and the description that the runner gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields

from jupyter_gpushare import messages
from jupyter_gpushare.broker.state.policy import is_url
from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.core.model import CheckpointMode, Kind, Lease
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire

# Terms of a job that its lease has under the same name.
_OF_LEASE = tuple(each.name for each in fields(Lease) if each.name in wire.JobTerms.__struct_fields__)
MAX_RUN_S = 365 * 86_400.0
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


# Programs that run another program, which their arguments name.
_RUNS_ANOTHER = re.compile(r"(python|pypy)[0-9.]*|ba?sh|sh|zsh|torchrun|accelerate|env|time|nice")


def default_name(command: Sequence[str]) -> str:
    """Return a short name of a command: ``train.py`` for ``python train.py --lr 1``."""
    words = [word.rstrip("/").rsplit("/", 1)[-1] for word in command]
    name = words[0]
    if _RUNS_ANOTHER.fullmatch(name):
        name = next((word for word in words[1:] if word and not word.startswith("-")), name)
    return name[:60]


def shown_name(job: JobRecord) -> str:
    """Return the name of a job's server on the Hub's pages: ``train.py (job k3v9m2x7qa)``."""
    name = " ".join(messages.printable(job.name).split())
    return f"{name} (job {job.id})".lstrip()


def check_job(request: wire.JobRequest) -> None:
    """Refuse a request that no runner could run.

    Raises:
        InvalidRequest: the text names the field and what to change.
    """
    if not request.command or not request.command[0].strip():
        raise InvalidRequest(
            "a job needs a command, for example: gpushare submit --gpus 1 -- python train.py"
        )
    if len(request.command) > wire.MAX_COMMAND_ARGS or sum(map(len, request.command)) > 100_000:
        raise InvalidRequest("the command is too long: put it into a script")
    if any("\0" in word for word in request.command):
        raise InvalidRequest("the command has a NUL character")
    if request.cwd is not None and (
        not request.cwd.startswith("/") or "\0" in request.cwd or len(request.cwd) > 4096
    ):
        raise InvalidRequest("cwd is an absolute path")
    if len(request.env) > wire.MAX_ENV or sum(len(k) + len(v) for k, v in request.env.items()) > 100_000:
        raise InvalidRequest("at most %1 environment variables, 100,000 characters together", wire.MAX_ENV)
    for name, value in request.env.items():
        if not _ENV_NAME.fullmatch(name) or "\0" in value:
            raise InvalidRequest("%1 is not a name of an environment variable", repr(name[:40]))
        if name.startswith(("GPUSHARE_", "JUPYTERHUB_", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD")):
            raise InvalidRequest("%1 is set by the system and cannot be given", name)
    if (source := request.source) is not None:
        texts: tuple[str, ...] = (source.path, source.kernel, source.output, source.arguments)
        texts += tuple(f"{key}{value}" for key, value in source.parameters.items())
        if sum(map(len, texts)) > 100_000 or any("\0" in text for text in texts):
            raise InvalidRequest("source: at most 100,000 characters together, none of them NUL")
    if request.name is not None and (not 1 <= len(request.name) <= 100 or "\0" in request.name):
        raise InvalidRequest("a name has 1 to 100 characters, none of them NUL")
    if request.notify_url and not is_url(request.notify_url):
        raise InvalidRequest(
            "a notification goes to a URL such as https://chat.example.org/hook, not %1",
            repr(request.notify_url[:60]),
        )
    if not -100 <= request.priority <= 100:
        raise InvalidRequest("priority is a whole number from -100 to 100")
    if not 0 <= request.retries <= 10:
        raise InvalidRequest("retries is a whole number from 0 to 10")
    if request.grace_s is not None and not 0 <= request.grace_s <= 3600:
        raise InvalidRequest("grace_s is a number of seconds from 0 to 3600")
    if request.max_run_s is not None and not 1 <= request.max_run_s <= MAX_RUN_S:
        raise InvalidRequest("the maximum run time is 1 second to 365 days")


def job_lease(lease_id: str, user: str, project: str, request: wire.JobRequest, now: float) -> Lease:
    """Return the lease of a job that enters the queue at ``now``.

    Raises:
        InvalidRequest: the request has no size, or several.
    """
    return Lease(
        id=lease_id,
        project=project,
        kind=Kind.TRAIN,
        size=request.requested_size(),
        user=user,
        survival=CheckpointMode(request.checkpoint),
        **{name: getattr(request, name) for name in _OF_LEASE},
        submitted_at=now,
        queued_at=now,
        waits_since_at=now,
    )


def job_spec(job: JobRecord, attempt: int, settled: int) -> wire.JobSpec:
    """Return the runner's description of one attempt; attempts up to ``settled`` have known outcomes."""
    return wire.JobSpec(
        id=job.id,
        attempt=attempt,
        settled=settled,
        name=job.name,
        command=list(job.command),
        cwd=job.cwd,
        env=job.env,
        grace_s=job.grace_s,
        notify_url=wire.decode_stored(job.request, wire.JobTerms).notify_url,
    )
