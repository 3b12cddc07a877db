"""The demo of `make hub`, and an example to copy: one machine, on which one user runs everything.

It runs without a GPU (on a simulated driver) and, unchanged, with one.  For a
machine with real users read docs/admin.md: it needs another spawner and authenticator,
and the broker and the device helper as separate services.

JupyterHub executes this file, and so does the broker (`--config`); each uses the
settings of its own classes.  So this file must have no effect that may not happen
twice.

Environment:
    GPUSHARE_DEMO_PORT          port of the Hub, on the loopback interface only (8000); the next three
                                ports are used internally: +1 Hub, +2 proxy's API, +3 broker
    GPUSHARE_DEMO_DIR           databases, secrets, users' homes (./demo-data); one per demo hub
    GPUSHARE_DEMO_IDLE_TIMEOUT  seconds after which an idle GPU may be lent (900)
    GPUSHARE_SIMULATE           devices of the simulated driver
                                ("2xH100-80GB,host=512GiB,copy=5GiB/s,checkpoint=any-uid": GPU memory is
                                copied at 5 GiB/s, and the last option lets it suspend without root);
                                unset: simulated only if no NVIDIA driver is found

Several demo hubs can run side by side, with different ports and folders.  A browser
distinguishes them only by host name: use 127.0.0.1 for one and localhost for another,
or private windows.
"""

import ctypes
import os
import sys
from pathlib import Path

from jupyter_gpushare import native
from jupyter_gpushare.channel import unix_url
from jupyter_gpushare.parent import bound

c = get_config()


# ---- ports and folders ---------------------------------------------------------------

here = Path(__file__).resolve().parent
port = int(os.environ.get("GPUSHARE_DEMO_PORT", "8000"))
state = Path(os.environ.get("GPUSHARE_DEMO_DIR", here / "demo-data")).resolve()
# Secrets and databases are readable by this user only.
for folder in (state, state / "broker", state / "home"):
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
# Programs of this environment (jupyter, gpushare, python) come first for every server and job.
path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


# ---- the driver: NVIDIA's, or the simulated one ------------------------------------------


def driver_found() -> bool:
    """Return whether this machine has an NVIDIA driver (before the simulated one can be found)."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# A real driver suspends processes only for root; this simulated one does so for every user.  It copies at
# the speed that is reported for an H100 (NVIDIA/cuda-checkpoint issue 29).
DEMO_MACHINE = "2xH100-80GB,host=512GiB,copy=5GiB/s,checkpoint=any-uid"
simulated = os.environ.get("GPUSHARE_SIMULATE") or ("" if driver_found() else DEMO_MACHINE)
driver = {}
if simulated:
    # All processes that find the simulated driver's libraries first share the same simulated devices.
    driver = {
        "GPUSHARE_SIMULATE": simulated,
        "GPUSHARE_SIM_STATE": str(state / "simulated-gpus"),
        "LD_LIBRARY_PATH": f"{native.sim_dir()}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
    }


# ---- the Hub ---------------------------------------------------------------------------

# Loopback only, because this demo accepts every password.
c.JupyterHub.bind_url = f"http://127.0.0.1:{port}"
c.JupyterHub.hub_bind_url = f"http://127.0.0.1:{port + 1}"
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{port + 2}"
# The proxy forwards browsers' requests to this address.
broker_address = f"http://127.0.0.1:{port + 3}"
api_socket = state / "broker" / "api.sock"

c.JupyterHub.db_url = f"sqlite:///{state / 'jupyterhub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(state / "cookie-secret")
c.ConfigurableHTTPProxy.pid_file = str(state / "proxy.pid")
# The proxy that `make setup` installed, else the one on PATH.  It always ends with the Hub (`bound`).
# JupyterHub alone would leave it running on its port when the Hub is killed or ends during its start.
local_proxy = Path(sys.executable).parent / "configurable-http-proxy"
c.ConfigurableHTTPProxy.command = bound(
    [str(local_proxy) if local_proxy.exists() else "configurable-http-proxy"]
)

# Any password is accepted, and all users are, also those that are not named below.
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.Authenticator.admin_users = {"admin"}
c.JupyterHub.template_vars = {
    "announcement_login": "This is a demo. Log in as <b>ada</b> (project vision), <b>bo</b> (nlp), "
    "<b>cy</b> (both) or <b>admin</b>, with any password. Try first: log in as ada and start with the "
    "size that is preselected."
}
# The members of a Hub group belong to the project of the same name (see GPUShareBroker.projects).
c.JupyterHub.load_groups = {
    "vision": {"users": ["ada", "cy"]},
    "nlp": {"users": ["bo", "cy"]},
}

# Training jobs are named servers of their owner, so these must be allowed.
c.JupyterHub.allow_named_servers = True
# Ctrl-C ends everything. In production set this to False: servers and jobs then live through
# a restart of the Hub.
c.JupyterHub.cleanup_servers = True
# `--respawn` watches the broker; the Hub's own check would log an error when Ctrl-C ends the broker first.
c.JupyterHub.service_check_interval = 0


# ---- servers ---------------------------------------------------------------------------

# All servers have the Hub's uid, which is for demos only. With system users use "gpushare-local".
c.JupyterHub.spawner_class = "gpushare-simple"
c.SimpleLocalProcessSpawner.home_dir_template = str(state / "home" / "{username}")
c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
# Terminals are not login shells, because /etc/profile would reset the PATH with the command `gpushare`.
c.Spawner.args = ["--ServerApp.terminado_settings={'shell_command': ['bash']}"]
# JupyterLab runs as root only with this option; the demo may run as root in a container.
if os.geteuid() == 0:
    c.Spawner.args.append("--allow-root")
c.Spawner.default_url = "/lab"
c.Spawner.environment = {**driver, "PATH": path}
# Seconds between the Hub's checks of a server; the default is 30. The device helper notices the end of a
# job much sooner; this is only for the Hub's own list.
c.Spawner.poll_interval = 5
# A slow machine may need this time for its first JupyterLab.
c.Spawner.start_timeout = 120
c.Spawner.http_timeout = 120

# Spawners and servers reach the broker at a socket that, unlike a port, only this user can create. The
# spawners prove their identity with a secret. The broker creates its file if it is missing; both sides
# refuse it if others can read it.
c.GPUShareMixin.broker_url = unix_url(api_socket)
c.GPUShareMixin.broker_token_file = str(state / "broker" / "spawner-token")


# ---- permissions ---------------------------------------------------------------------------

# The first scope permits submitting jobs: remove it from a role to forbid jobs.
c.JupyterHub.custom_scopes = {
    "custom:gpushare:jobs": {"description": "Submit and manage training jobs"},
    "custom:gpushare:admin": {
        "description": "See all leases and jobs, change quotas, and act on them for their users"
    },
}
# Scopes of every user in addition to the Hub's own list. A user's server gets those that GPUShareMixin
# requests (its default of Spawner.server_token_scopes). If you set c.Spawner.server_token_scopes, name all
# four:
#   users:activity!user, access:servers!server, access:services!service=gpushare, custom:gpushare:jobs
c.JupyterHub.extra_user_scopes = {"custom:gpushare:jobs", "access:services!service=gpushare"}
c.JupyterHub.load_roles = [
    {
        "name": "gpushare-admin",
        "description": "Looks after the GPUs",
        "users": ["admin"],
        "scopes": ["custom:gpushare:admin"],
    },
    {
        "name": "gpushare-broker",
        "description": "Knows users, groups and servers; starts and removes the servers of jobs",
        "services": ["gpushare"],
        "scopes": [
            "list:users",
            "read:users",
            "read:groups",
            "read:servers",
            "servers",
            "delete:servers",
            "list:services",  # to find those that stop idle servers
            "read:services",
        ],
    },
]


# ---- the broker, as a service that the Hub starts -----------------------------------------

c.JupyterHub.services = [
    {
        "name": "gpushare",
        "url": broker_address,
        # --respawn: a parent restarts the broker within 1 s; the Hub would only check every 30 s.
        # --with-helper: also run the device helper, as this user; as root it is a separate service.
        # bound: the broker ends with the Hub, even during the Hub's start.
        "command": bound(
            [
                sys.executable,
                "-m",
                "jupyter_gpushare.cli",
                "broker",
                "--respawn",
                "--with-helper",
                f"--config={Path(__file__).resolve()}",
            ]
        ),
        # The Hub passes little of its environment to services; this file needs these variables.
        "environment": {
            **driver,
            "PATH": path,
            **{key: value for key, value in os.environ.items() if key.startswith("GPUSHARE_DEMO_")},
        },
        # A login on the broker's page gets these scopes, if the user has them.
        "oauth_client_allowed_scopes": ["custom:gpushare:jobs", "custom:gpushare:admin"],
        # The admin page of the broker skips the OAuth confirmation page.
        "oauth_no_confirm": True,
    }
]


# ---- the broker's own settings (read by the broker process) ---------------------------------

c.GPUShareBroker.state_dir = str(state / "broker")
c.GPUShareBroker.db_url = f"sqlite:///{state / 'broker' / 'broker.sqlite'}"
c.GPUShareBroker.api_socket = str(api_socket)
c.GPUShareBroker.helper_socket = str(state / "broker" / "helper.sock")
c.GPUShareBroker.spawner_token_file = str(state / "broker" / "spawner-token")
# Half of the machine's GPUs are guaranteed to each project; the other project may borrow unused ones.
c.GPUShareBroker.projects = {
    "vision": {"quota": "50%", "groups": ["vision"]},
    "nlp": {"quota": "50%", "groups": ["nlp"]},
}
# Off on a real driver until `make test-gpu` has measured the cost of turns on it.
c.GPUShareBroker.compute_share = "fair" if simulated else "off"
# Likewise: jobs whose owners agree run on parts of GPUs that other jobs leave unused.
c.GPUShareBroker.share = bool(simulated)
# After these seconds without a busy kernel and GPU activity, a GPU may be lent to waiting work.
c.GPUShareBroker.idle_timeout = float(os.environ.get("GPUSHARE_DEMO_IDLE_TIMEOUT", "900"))
