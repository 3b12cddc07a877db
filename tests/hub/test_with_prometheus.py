"""A Prometheus server that scrapes the broker as docs/operations.md, *Monitoring*, sets it up.

Hub, broker and device helper are real processes; GPUs are simulated.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.chapters import ROOT, block
from tests.faults.site import Site
from tests.ports import free_ports
from tests.waiting import PATIENCE_S, until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="needs Prometheus: apt-get install prometheus",
    ),
]

RULES = ROOT / "docs" / "monitoring" / "alerts.yml"
TOKEN = "token-of-prometheus"
ROLE = f"""
c.JupyterHub.services.append({{"name": "prometheus", "api_token": {TOKEN!r}}})
c.JupyterHub.load_roles.append({{
    "name": "prometheus",
    "services": ["prometheus"],
    "scopes": ["read:metrics", "access:services!service=gpushare"],
}})
"""


class Prometheus:
    """A Prometheus server with the page's scrape configuration and the shipped alert rules."""

    def __init__(self, folder: Path, broker: str) -> None:
        self.config = folder / "prometheus.yml"
        token = folder / "prometheus-token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        scrapes = block("operations", "Monitoring", "yaml")
        for stands_for, here in (("127.0.0.1:8011", broker), ("/etc/prometheus/gpushare-token", token)):
            assert stands_for in scrapes
            scrapes = scrapes.replace(stands_for, str(here))
        often = "global: {scrape_interval: 5s, evaluation_interval: 1s}\n"
        self.config.write_text(f"{often}rule_files: [{RULES}]\n{scrapes}")
        address = f"127.0.0.1:{free_ports()}"
        command = ["prometheus", f"--config.file={self.config}", f"--storage.tsdb.path={folder}/tsdb"]
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--web.listen-address={address}"], cwd=folder, stdout=log, stderr=log
            )
        self._http = httpx.Client(base_url=f"http://{address}/api/v1/", trust_env=False, timeout=PATIENCE_S)

    def ask(self, path: str, **parameters: str) -> Any:
        """Its answer; None: it does not answer yet."""
        try:
            answer = self._http.get(path, params=parameters)
        except httpx.TransportError:
            return None
        return answer.json()["data"] if answer.status_code == 200 else None

    def value(self, query: str) -> float | None:
        """The one value of a query now; None: there is none."""
        found = (self.ask("query", query=query) or {}).get("result")
        return float(found[0]["value"][1]) if found else None

    def alerts(self) -> dict[str, dict[str, Any]]:
        """The rules that it evaluated, by name."""
        groups = (self.ask("rules") or {}).get("groups", [])
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def close(self) -> None:
        self._http.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="gpushare-prometheus-") as name:
        made = Site(Path(name))
        try:
            with made.hub.config.open("a") as config:
                config.write(ROLE)
            made.start()
            yield made
        finally:
            made.close()


@pytest.fixture
def prometheus(site: Site) -> Iterator[Prometheus]:
    made = Prometheus(site.folder, site.http.base_url.netloc.decode())
    try:
        yield made
    finally:
        made.close()


def promtool(*arguments: str | Path, said: str = "") -> None:
    """Run promtool with ``said`` on its standard input; it finds nothing to say."""
    done = subprocess.run(
        ["promtool", *arguments], input=said, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_prometheus_server_scrapes_the_broker_and_evaluates_the_alert_rules(
    site: Site, prometheus: Prometheus
) -> None:
    def watched(query: str, wanted: float) -> None:
        until(
            lambda: prometheus.value(query) == wanted,
            f"{query} is {wanted:g}",
            process=prometheus.process,
            log=prometheus.log,
        )

    watched('up{job="gpushare"}', 1)
    watched("gpushare_broker_epoch", 1)
    watched("sum(gpushare_device_held_gpus)", 0)
    site.hub.start_server("ada", {"fraction": "1"})
    watched("sum(gpushare_device_held_gpus)", 1)
    watched('gpushare_spawns_total{outcome="granted"}', 1)
    gpus = 'rate(gpushare_gpu_seconds_total{state="idle"}[1m])'
    until(lambda: (prometheus.value(gpus) or 0) > 0, "GPU-seconds are counted", log=prometheus.log)
    shipped = {
        rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    }
    until(
        lambda: {n for n, rule in prometheus.alerts().items() if rule["health"] == "ok"} == shipped,
        "every rule is evaluated",
        log=prometheus.log,
    )
    until(  # one slow scrape makes an alert pending until the next
        lambda: {rule["state"] for rule in prometheus.alerts().values()} == {"inactive"},
        "no alert is raised",
        log=prometheus.log,
    )
    site.services["broker"].kill()
    watched('up{job="gpushare"}', 0)
    until(
        lambda: prometheus.alerts()["GpuBrokerSilent"]["state"] == "pending",
        "the alert for a silent broker begins its 5 min",
    )


def test_promtool_accepts_the_configuration_the_rules_and_the_metrics(
    site: Site, prometheus: Prometheus
) -> None:
    """The commands of docs/operations.md, *Monitoring*."""
    promtool("check", "config", "--syntax-only", prometheus.config)
    promtool("check", "rules", RULES)
    url = f"http://{site.http.base_url.netloc.decode()}/services/gpushare/metrics"
    metrics = httpx.get(url, headers={"Authorization": f"token {TOKEN}"}, trust_env=False, timeout=PATIENCE_S)
    assert metrics.status_code == 200
    promtool("check", "metrics", said=metrics.text)
