"""The broker's traits, and their conversion to a policy."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Any

from traitlets import Bool, Dict, Enum, Integer, List, TraitError, Unicode, default, validate
from traitlets import Float as AnyFloat
from traitlets.config import Application

from jupyter_gpushare.broker.state.policy import Policy, Receivers, is_url, parse_project
from jupyter_gpushare.broker.state.records import LendingMode
from jupyter_gpushare.core.model import DEFAULT_ORDER, DEFAULT_POLICY, WHOLE_GPU, Order
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol.helper import ComputeShare

# Defaults that `core` does not read; `DEFAULT_POLICY` has the others.
_SITE = Policy(projects=())


class Float(AnyFloat[Any, Any]):
    """A number from 0 to below 10 million."""

    def validate(self, obj: Any, value: Any) -> float:
        number = float(super().validate(obj, value))
        if not 0 <= number < 10_000_000:
            raise TraitError(f"{self.name} is a number of 0 or more (below 10000000), not {number}")
        return number


class BrokerTraits(Application):
    """Configuration of `app.GPUShareBroker`, under that name."""

    config_file = Unicode("", help="Configuration file; may be the Hub's own jupyterhub_config.py.").tag(
        config=True
    )
    engine = Enum(
        ["planner", "kai"],
        "planner",
        help="What decides about GPUs: ``planner``, the one of this package, for the GPUs of this machine; "
        "``kai``, KAI-Scheduler on a Kubernetes cluster (c.GPUShareKube, docs/kubernetes.md).",
    ).tag(config=True)
    respawn = Bool(False, help="Run as the parent that starts the broker again within a second.").tag(
        config=True
    )
    with_helper = Bool(
        False, help="With respawn: also keep a device helper running, as the same user (for demos)."
    ).tag(config=True)
    projects = Dict(
        help="""Projects and their guarantees: project name to a dict of

        * ``quota``: guaranteed GPUs, a number (1.5) or a percentage of the machine's GPUs ("50%");
        * ``weight``: share of what is over, 1 by default;
        * ``limit``: hard cap in GPUs, none by default;
        * ``priority``: among projects below their quota the higher comes first, 0 by default;
        * ``priority_max``: the highest priority that its members may give to their jobs, 0 to 100, 0 by
          default; everybody may give less;
        * ``groups``: the Hub groups of its members, by default the group of the same name;
        * ``never_sleep``: True lets its members mark sessions that are never put to sleep;
        * ``idle_timeout``, ``notice``, ``max_hold`` and ``keep_minutes_per_day``: of its sessions, instead
          of the values below. A project with a budget of its own counts what is kept there by itself; its
          ``idle_timeout`` also goes before adaptive_idle.
        """
    ).tag(config=True)
    lending = Enum(
        [mode.value for mode in LendingMode],
        _SITE.lending.value,
        help="Whether GPUs of idle sessions are lent. ``watch`` only logs which session would have been put "
        "to sleep for which job and for how long, and touches no process; ``off`` puts no session to sleep "
        "and wakes those that sleep. An administrator changes it at any time with `gpushare admin lending` "
        "or on the service's page, which then counts until it is set back to ``default``.",
    ).tag(config=True)
    compute_share = Enum(
        [mode.value for mode in ComputeShare],
        _SITE.compute_share.value,
        help="How leases that compute on one GPU at the same time share its time. ``off``: as the driver "
        "divides it, equally between processes; ``fair``: by turns, each lease in proportion to the part of "
        "the GPU that it holds, and what one leaves the others get; ``strict``: by turns, and no lease gets "
        "more than its part, alone or not. A share is kept between kernels: a kernel of 300 ms is never cut "
        "(docs/concepts.md). Off until ``make test-gpu`` has measured what turns cost on this driver.",
    ).tag(config=True)
    share = Bool(
        _SITE.share,
        help="Whether a training job may run as a guest on the GPU of another job, in memory and time that "
        "this one, its host, holds and does not use. The owners of both have to agree (``gpushare submit "
        "--share yes``). A guest is suspended as soon as its host needs the memory, and when its host keeps "
        "less than 90 % of its speed (docs/concepts.md). Off on a real driver until ``make test-gpu`` has "
        "shown that it pays there; not with the engine ``kai``.",
    ).tag(config=True)
    share_between_projects = Bool(
        _SITE.share_between_projects,
        help="With share: a guest may be on a GPU that a job of another project holds, and not only on one "
        "of its own project.",
    ).tag(config=True)
    idle_timeout = Float(
        DEFAULT_POLICY.idle_timeout_s,
        help="Seconds without a cell that runs and without GPU work after which a session's GPU may be "
        "lent, if a lease waits. Shorter lends more and wakes more often (see docs/concepts.md).",
    ).tag(config=True)
    notice = Float(
        DEFAULT_POLICY.notice_s,
        help="Seconds for which the owner of an idle session within its guarantee is told before it is put "
        "to sleep for a waiting job, at most a third of idle_timeout; 0: no notice. Longer gives more time "
        "to keep the GPU, and delays the job. An owner who comes back never waits for it.",
    ).tag(config=True)
    max_hold = Float(
        _SITE.max_hold_s,
        allow_none=True,
        help="Seconds after its last GPU work for which a session stays busy because its kernels run cells "
        "on the processor alone, such as 172800 for two days; from then on it counts as idle, and "
        "idle_timeout begins. None: for as long as they run. Shorter lends GPUs of long computations that "
        "do not use them; the first GPU call brings the GPU back.",
    ).tag(config=True)
    adaptive_idle = Bool(
        False,
        help="Learn from the pauses of each session when its GPU may be lent (after 10 min to 4 h), instead "
        "of idle_timeout: sooner where GPUs are many and after a long cell, later where the owner took many "
        "breaks within the last days and was back each time.",
    ).tag(config=True)
    order = Enum(
        [order.value for order in Order],
        DEFAULT_ORDER.value,
        help="How the jobs of one project are ordered, after their priority: ``progress`` (least "
        "remaining work of jobs that report progress, ``las`` for the others), ``las`` (least attained "
        "service: the job that received least goes first, and may preempt), ``backfill`` (first come first "
        "served, a job that does not fit is bypassed for a while), ``fifo`` (strictly first come first "
        "served).",
    ).tag(config=True)
    las_thresholds = List(
        AnyFloat(),
        list(DEFAULT_POLICY.las_thresholds_gpu_s),
        help="With order progress or las: the GPU-seconds at which a job enters the next queue; ascending.",
    ).tag(config=True)
    min_run = Float(
        DEFAULT_POLICY.min_run_s,
        help="Seconds for which a job runs before another one of its project may preempt it; a job that "
        "begins again when it is stopped may make way earlier in place of one that loses more. Capacity that "
        "another project's quota or a session's owner is entitled to is reclaimed at any time.",
    ).tag(config=True)
    preempt_cost = Float(
        DEFAULT_POLICY.preempt_cost_s,
        help="What a preemption costs, in seconds of each GPU that changes hands, in addition to the grace "
        "and the lost work of a job that is stopped. A preemption that gains less is not done.",
    ).tag(config=True)
    guard = Float(
        DEFAULT_POLICY.starvation_guard_s,
        allow_none=True,
        help="Seconds of waiting after which a job comes first in its project, and GPUs are kept for it "
        "against all within the project's share; None: never. The orders progress and las do so only where "
        "min_run is above 0.",
    ).tag(config=True)
    skip_wait = Float(
        DEFAULT_POLICY.max_bypass_s,
        allow_none=True,
        help="With order backfill: seconds of waiting after which no job of its project overtakes it; "
        "None: never.",
    ).tag(config=True)
    catch_up = Float(
        DEFAULT_POLICY.fairness_horizon_s,
        allow_none=True,
        help="Seconds in which a project with waiting jobs gets what it lags behind its fair share. Shorter "
        "keeps shares closer over a day and preempts more; None: shares are kept at each moment only.",
    ).tag(config=True)
    grace = Float(
        _SITE.grace_s,
        help="Seconds between SIGTERM and SIGKILL when a job is stopped, unless the job says otherwise.",
    ).tag(config=True)
    max_grace = Float(
        _SITE.max_grace_s,
        help="The longest grace, in seconds, that a job may ask for. The owner of a lent GPU may have to "
        "wait that long for it.",
    ).tag(config=True)
    min_fraction = Float(
        0.05,
        min=0.001,
        max=1.0,
        help="The smallest part of a GPU that can be asked for; a machine holds 256 leases at most.",
    ).tag(config=True)
    sizes = List(
        Unicode(),
        ["1/4", "1/2", "1"],
        help="Sizes offered on the spawn page, in GPUs, such as 1/4, 0.5, 1 or 2.",
    ).tag(config=True)
    state_dir = Unicode(
        "/var/lib/gpushare", help="Directory of the broker's own files; must not be writable for others."
    ).tag(config=True)
    db_url = Unicode(
        help="SQLAlchemy URL of the broker's database, never the Hub's; default: the environment variable "
        "GPUSHARE_DB_URL (a command line shows passwords to others), else SQLite in state_dir."
    ).tag(config=True)
    helper_socket = Unicode(help="Unix socket of the device helper; by default in state_dir.").tag(
        config=True
    )
    helper_state_dir = Unicode(
        help="With with_helper: the helper's own files; default: helper/ in state_dir."
    ).tag(config=True)
    api_socket = Unicode(
        help="Unix socket for the Hub, servers, jobs and command line of this machine; by default api.sock "
        "in state_dir. Its folder must be writable for the broker's user alone, and open (0711) where "
        "servers have users of their own: they trust what listens there."
    ).tag(config=True)
    tls_address = Unicode(
        "",
        help="HOST:PORT, such as 10.0.0.5:8004 or [fd00::5]:8004, where servers, and a Hub, of other "
        "machines or containers reach the broker over TLS; none by default. They accept no certificate but "
        "api-certificate.pem of state_dir, which is made when it is missing "
        "(c.GPUShareMixin.broker_certificate_file).",
    ).tag(config=True)
    proxies = List(
        Unicode(),
        help="Addresses or networks, such as 10.0.0.5 or 10.0.1.0/24, of proxies between browsers and the "
        "broker, whose X-Forwarded-For is believed: what stands before the Hub's proxy (nginx on this "
        "machine: 127.0.0.1), and the Hub's proxy where it runs on another machine or as another user than "
        "root and the broker's. Requests are counted by the client that they name; without them all clients "
        "behind such a proxy count as one.",
    ).tag(config=True)
    spawner_token_file = Unicode(
        help="File (mode 0600) with the token that the Hub's spawner uses; by default spawner-token in "
        "state_dir. It is made when it is missing. Of several lines each is accepted, and spawners use the "
        "first: so a token is replaced without a refused start (docs/operations.md)."
    ).tag(config=True)
    notify_url = Unicode(
        "",
        help="Address that gets JSON by POST about each job that starts, is paused, nears its maximum run "
        "time or ends (docs/jobs.md has its fields). Webhooks of users are called by their own jobs.",
    ).tag(config=True)
    mail_command = List(
        Unicode(),
        help="Program with its arguments, run without a shell, that sends the mail on its standard input, "
        "such as ['/usr/sbin/sendmail', '-i', '-t']; none by default. Users ask for mail about a job with "
        "`gpushare submit --mail`.",
    ).tag(config=True)
    mail_to = Unicode(
        "{user}",
        help="Mail address of a user, such as {user}@example.org; {user} alone where names are addresses.",
    ).tag(config=True)
    mail_from = Unicode("", help="Sender of mails; by default what mail_command fills in.").tag(config=True)
    max_jobs = Integer(_SITE.max_jobs, min=1, help="Jobs that may wait or run, all users together.").tag(
        config=True
    )
    max_jobs_per_user = Integer(
        _SITE.max_jobs_per_user, min=1, help="Jobs of one user that may wait or run."
    ).tag(config=True)
    keep_minutes_per_day = Float(
        _SITE.keep_minutes_per_day,
        help="Minutes a day for which a user may keep an idle GPU from being lent.",
    ).tag(config=True)
    fake_busy_after = Float(
        _SITE.fake_busy_after_s,
        help="Seconds after which a session whose programs call the driver while its GPUs stay below 2 % "
        "utilization gets a notice, and is listed under Needs a look on the administrator's page; 0: never. "
        "Its GPU is not lent for that: its own calls would take it back at once.",
    ).tag(config=True)
    identity_cache_s = Integer(
        30, min=1, max=300, help="Seconds for which the Hub's answer about a token is cached."
    ).tag(config=True)

    @default("db_url")
    def _default_db_url(self) -> str:
        sqlite = f"sqlite:///{Path(self.state_dir).absolute() / 'broker.sqlite'}"
        return os.environ.get("GPUSHARE_DB_URL") or sqlite

    @default("helper_socket")
    def _default_helper_socket(self) -> str:
        return str(Path(self.state_dir) / "helper.sock")

    @default("api_socket")
    def _default_api_socket(self) -> str:
        return str(Path(self.state_dir) / "api.sock")

    @default("helper_state_dir")
    def _default_helper_state_dir(self) -> str:
        return str(Path(self.state_dir) / "helper")

    @default("spawner_token_file")
    def _default_spawner_token_file(self) -> str:
        return str(Path(self.state_dir) / "spawner-token")

    @validate("tls_address")
    def _host_and_port(self, proposal: Any) -> str:
        host, _, port = proposal.value.rpartition(":")
        is_host = bool(host) and (":" not in host or (host.startswith("[") and host.endswith("]")))
        if proposal.value and not (is_host and port.isdecimal() and 0 < int(port) < 65_536):
            raise TraitError(
                f"tls_address is HOST:PORT, such as 10.0.0.5:8004 or [fd00::5]:8004, not {proposal.value!r}"
            )
        return str(proposal.value)

    @validate("proxies")
    def _addresses(self, proposal: Any) -> list[str]:
        for each in proposal.value:
            try:
                ipaddress.ip_network(each, strict=False)
            except ValueError:
                raise TraitError(
                    f"proxies are addresses or networks such as 10.0.0.5, not {each!r}"
                ) from None
        return list(proposal.value)

    @validate("notify_url")
    def _web_address(self, proposal: Any) -> str:
        if proposal.value and not is_url(proposal.value):
            raise TraitError("notify_url is an address such as https://chat.example.org/hook")
        return str(proposal.value)

    @validate("share")
    def _share_with_planner(self, proposal: Any) -> bool:
        if proposal.value and self.engine == "kai":
            raise TraitError(
                "share is for the engine planner: with kai the scheduler of the cluster places every job, "
                "and gives no GPU to a guest"
            )
        return bool(proposal.value)

    @validate("mail_to")
    def _one_address(self, proposal: Any) -> str:
        if proposal.value.count("{user}") != 1 or not proposal.value.isprintable():
            raise TraitError(f"mail_to is an address with {{user}}, not {proposal.value!r}")
        return str(proposal.value)

    def receivers(self) -> Receivers:
        """Return the receivers of the broker's messages about jobs."""
        return Receivers(self.notify_url, tuple(self.mail_command), self.mail_to, self.mail_from)

    @validate("las_thresholds")
    def _ascending(self, proposal: Any) -> list[float]:
        values = list(proposal.value)
        if any(value <= 0 for value in values) or sorted(set(values)) != values or len(values) > 16:
            raise TraitError(f"las_thresholds are up to 16 numbers above 0, ascending, not {values}")
        return values

    @validate("projects")
    def _known_projects(self, proposal: Any) -> dict[str, Any]:
        try:
            for name, config in proposal.value.items():
                parse_project(name, config)
        except InvalidRequest as error:
            raise TraitError(f"GPUShareBroker.projects: {error}") from None
        return dict(proposal.value)

    @validate("sizes")
    def _known_sizes(self, proposal: Any) -> list[str]:
        try:
            for size in proposal.value:
                Size.of_gpus(size)
        except InvalidRequest as error:
            raise TraitError(f"GPUShareBroker.sizes: {error}") from None
        return list(proposal.value)

    def policy(self) -> Policy:
        """Return the configuration as plain values."""
        sizes = tuple(map(Size.of_gpus, self.sizes))
        return Policy(
            projects=tuple(parse_project(name, config) for name, config in self.projects.items()),
            idle_timeout_s=self.idle_timeout,
            notice_s=self.notice,
            adaptive_idle=self.adaptive_idle,
            order=Order(self.order),
            las_thresholds_gpu_s=tuple(self.las_thresholds),
            min_run_s=self.min_run,
            preempt_cost_s=self.preempt_cost,
            starvation_guard_s=self.guard,
            max_bypass_s=self.skip_wait,
            fairness_horizon_s=self.catch_up,
            grace_s=self.grace,
            max_grace_s=max(self.grace, self.max_grace),
            # Users can request every offered size.
            min_fraction_milli=min(
                [round(self.min_fraction * WHOLE_GPU), *(size.fraction_milli for size in sizes)]
            ),
            sizes=sizes,
            max_jobs=self.max_jobs,
            max_jobs_per_user=self.max_jobs_per_user,
            keep_minutes_per_day=self.keep_minutes_per_day,
            fake_busy_after_s=self.fake_busy_after,
            max_hold_s=self.max_hold,
            lending=LendingMode(self.lending),
            compute_share=ComputeShare(self.compute_share),
            share=self.share,
            share_between_projects=self.share_between_projects,
        )
