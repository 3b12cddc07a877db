"""The parts of systemd-run and systemctl that SystemdSpawner calls; a unit is a process of this machine.

It follows systemd 252: systemd-run fails for a transient unit whose name is active, `is-active` exits
with 3 for a unit that does not run, and `stop` ends a unit and removes its RuntimeDirectory, where
the spawner keeps the file of its environment.  UNITS/NAME.json keeps the properties of every unit
that was started.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

UNITS = Path(__file__).resolve().parent / "units"


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def unit(name):
    path = UNITS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def run(arguments):
    made = {"properties": [], "uid": None}
    while arguments[0].startswith("--"):
        option, equals, value = arguments.pop(0).partition("=")
        if not equals:
            value = arguments.pop(0)
        if option == "--property":
            made["properties"].append(value)
        else:
            made[option[2:]] = value
    there = unit(made["unit"])
    if there is not None and alive(there["pid"]):
        sys.exit(f"Failed to start transient service unit: Unit {made['unit']}.service already exists.")
    environment = {}
    for each in made["properties"]:
        name, _, value = each.partition("=")
        if name == "EnvironmentFile":
            for line in Path(value).read_text().splitlines():
                key, _, quoted = line.partition("=")
                environment[key] = "".join(shlex.split(quoted))
    environment.pop("LD_PRELOAD", None)
    process = subprocess.Popen(arguments, env=environment, start_new_session=True)
    made |= {"pid": process.pid, "environment": environment, "command": arguments}
    (UNITS / f"{made['unit']}.json").write_text(json.dumps(made))


def control(verb, name=""):
    if verb == "--version":
        print("systemd 252 (252.39-1~deb12u1)")
        return 0
    there = unit(name)
    running = there is not None and alive(there["pid"])
    if verb == "is-active":
        return 0 if running else 3
    if verb == "stop" and running:
        os.kill(there["pid"], signal.SIGTERM)
        while alive(there["pid"]):
            time.sleep(0.02)
        for each in there["properties"]:
            if each.startswith("EnvironmentFile="):
                shutil.rmtree(Path(each.partition("=")[2]).parent)
    return 1 if verb == "is-failed" else 0


if __name__ == "__main__":
    UNITS.mkdir(exist_ok=True)
    if Path(sys.argv[0]).name == "systemd-run":
        run(sys.argv[1:])
    else:
        sys.exit(control(*sys.argv[1:]))
