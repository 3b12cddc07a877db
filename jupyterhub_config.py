"""The demo of `make hub`, and the example to copy from: one machine, everything of one user.

It runs without a GPU (on a simulated driver) and, unchanged, with one.  For a
machine with real users read docs/admin.md: other spawner, other authenticator,
broker and device helper as services of their own.

JupyterHub executes this file, and so does the broker (`--config`): each takes
the settings of its own classes.  Nothing here has an effect that may not happen
twice.

Environment:
    GPUSHARE_DEMO_PORT          where the Hub listens, on the loopback interface only (8000); the three
                                ports behind it are used inside: +1 Hub, +2 proxy's API, +3 broker
    GPUSHARE_DEMO_DIR           databases, secrets, users' homes (./demo-data); one per demo hub
    GPUSHARE_DEMO_IDLE_TIMEOUT  seconds after which an idle GPU may be lent (900)
    GPUSHARE_SIMULATE           devices of the simulated driver
                                ("2xH100-80GB,host=512GiB,copy=5GiB/s,checkpoint=any-uid": GPU memory is
                                copied at 5 GiB/s, and the last option lets it suspend without root);
                                unset: simulated only where no NVIDIA driver is found

Several demo hubs run side by side with ports and folders of their own.  A
browser knows them apart only by host name: use 127.0.0.1 for one and localhost
for another, or private windows.
"""

import ctypes
import os
import sys
from pathlib import Path

from jupyter_gpushare import native
from jupyter_gpushare.channel import unix_url
from jupyter_gpushare.parent import bound

c = get_config()


# ---- where things are ----------------------------------------------------------------

here = Path(__file__).resolve().parent
port = int(os.environ.get("GPUSHARE_DEMO_PORT", "8000"))
state = Path(os.environ.get("GPUSHARE_DEMO_DIR", here / "demo-data")).resolve()
# Secrets and databases: readable by this user only.
for folder in (state, state / "broker", state / "home"):
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
# Programs of this environment (jupyter, gpushare, python) come first for every server and job.
path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


# ---- the driver: NVIDIA's, or the simulated one ------------------------------------------


def driver_found() -> bool:
    """Whether this machine has an NVIDIA driver (asked before the simulated one can answer)."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# A real driver suspends processes only for root; the simulated one does it for every user here.
# Copies at the speed that is reported for H100 (NVIDIA/cuda-checkpoint issue 29).
DEMO_MACHINE = "2xH100-80GB,host=512GiB,copy=5GiB/s,checkpoint=any-uid"
simulated = os.environ.get("GPUSHARE_SIMULATE") or ("" if driver_found() else DEMO_MACHINE)
driver = {}
if simulated:
    # All processes that find the simulated driver's libraries first see the same simulated devices.
    driver = {
        "GPUSHARE_SIMULATE": simulated,
        "GPUSHARE_SIM_STATE": str(state / "simulated-gpus"),
        "LD_LIBRARY_PATH": f"{native.sim_dir()}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
    }


# ---- the Hub ---------------------------------------------------------------------------

# Loopback only: in this demo every password is right.
c.JupyterHub.bind_url = f"http://127.0.0.1:{port}"
c.JupyterHub.hub_bind_url = f"http://127.0.0.1:{port + 1}"
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{port + 2}"
# The proxy sends browsers' requests here.
broker_address = f"http://127.0.0.1:{port + 3}"
api_socket = state / "broker" / "api.sock"

c.JupyterHub.db_url = f"sqlite:///{state / 'jupyterhub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(state / "cookie-secret")
c.ConfigurableHTTPProxy.pid_file = str(state / "proxy.pid")
# The proxy that `make setup` installed, else the one on PATH.  It ends with the Hub (`bound`), however
# that ends: JupyterHub leaves it behind, on its port, when it is killed or ends while it starts.
local_proxy = Path(sys.executable).parent / "configurable-http-proxy"
c.ConfigurableHTTPProxy.command = bound(
    [str(local_proxy) if local_proxy.exists() else "configurable-http-proxy"]
)

# Any password; all users are let in, also those that are not named below.
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
# `--respawn` watches the broker; the Hub's own check of it logs an error when Ctrl-C ends the broker first.
c.JupyterHub.service_check_interval = 0


# ---- servers ---------------------------------------------------------------------------

# All servers have the Hub's own uid: for a demo only. With system users: "gpushare-local".
c.JupyterHub.spawner_class = "gpushare-simple"
c.SimpleLocalProcessSpawner.home_dir_template = str(state / "home" / "{username}")
c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
# Terminals without a login shell: /etc/profile would forget the PATH with the command `gpushare`.
c.Spawner.args = ["--ServerApp.terminado_settings={'shell_command': ['bash']}"]
# JupyterLab refuses to run as root unless told so; this demo may be tried in a container as root.
if os.geteuid() == 0:
    c.Spawner.args.append("--allow-root")
c.Spawner.default_url = "/lab"
c.Spawner.environment = {**driver, "PATH": path}
# The Hub looks that often (s) whether a server is still there; the default is 30. A job's end
# is noticed much sooner by the device helper; this is only for the Hub's own list.
c.Spawner.poll_interval = 5
# A slow machine may need long for a first JupyterLab.
c.Spawner.start_timeout = 120
c.Spawner.http_timeout = 120

# Where spawners and servers find the broker: a socket that only this user can put there, unlike a
# port; and the secret that tells the broker that the Hub's spawners ask.
# The broker makes the file when it is missing; both sides refuse it if others can read it.
c.GPUShareMixin.broker_url = unix_url(api_socket)
c.GPUShareMixin.broker_token_file = str(state / "broker" / "spawner-token")


# ---- permissions ---------------------------------------------------------------------------

# Scope that permits submitting jobs: remove it from a role to forbid jobs.
c.JupyterHub.custom_scopes = {
    "custom:gpushare:jobs": {"description": "Submit and manage training jobs"},
    "custom:gpushare:admin": {
        "description": "See all leases and jobs, change quotas, and act on them for their users"
    },
}
# What every user may do beyond the Hub's own list; a user's server gets the part of it that
# GPUShareMixin asks for (its default of Spawner.server_token_scopes). If you set
# c.Spawner.server_token_scopes yourself, name all four:
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
            "list:services",  # which of them stop idle servers
            "read:services",
        ],
    },
]


# ---- the broker, as a service that the Hub starts -----------------------------------------

c.JupyterHub.services = [
    {
        "name": "gpushare",
        "url": broker_address,
        # --respawn: a parent that starts it again within a second; the Hub looks every 30 s only.
        # --with-helper: also the device helper, as this user; with root it is a service of its own.
        # bound: it ends with the Hub, however early that ends.
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
        # The Hub passes little of its own environment on to services; this file reads the rest.
        "environment": {
            **driver,
            "PATH": path,
            **{key: value for key, value in os.environ.items() if key.startswith("GPUSHARE_DEMO_")},
        },
        # Scopes of a login on the broker's page, out of the user's own.
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
# Half of the machine's GPUs are guaranteed to each project; what one does not use, the other borrows.
c.GPUShareBroker.projects = {
    "vision": {"quota": "50%", "groups": ["vision"]},
    "nlp": {"quota": "50%", "groups": ["nlp"]},
}
# On a real driver off until `make test-gpu` has measured there what turns cost.
c.GPUShareBroker.compute_share = "fair" if simulated else "off"
# Likewise: jobs whose owners agreed run on what other jobs leave of their GPUs.
c.GPUShareBroker.share = bool(simulated)
# Seconds without a busy kernel and without GPU activity, after which a GPU may be lent to waiting work.
c.GPUShareBroker.idle_timeout = float(os.environ.get("GPUSHARE_DEMO_IDLE_TIMEOUT", "900"))
