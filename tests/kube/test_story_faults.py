"""What people keep when parts of a cluster fail: the nodes, people and jobs of the story.

`test_story` says what is real, and has the fault that `make test` tries.  Each test leaves everything at
work for the next one; the last one loses a node.
"""

from __future__ import annotations

import os
import time

import pytest

from jupyter_gpushare.broker.control.observer import GONE_S
from tests.kube.test_broker import NS
from tests.kube.test_story import (
    Lent,
    come_back,
    everything_settles,
    helper_pod,
    lease_of,
    lent,
    start_helper,
    story,
)
from tests.waiting import until

__all__ = ["lent", "story"]  # fixtures

pytestmark = pytest.mark.timeout(900)
if os.environ.get("GPUSHARE_TEST_ENGINE") != "kai":  # `make test-engine` runs none that is long
    pytestmark = [pytestmark, pytest.mark.long]


def works(lent: Lent) -> None:
    """The session's cell works, in the same process and on the same GPU, then its idle GPU is lent."""
    come_back(lent)
    until(lent.guest.runs, "the idle GPU is lent", 300)
    everything_settles(lent)


def test_a_job_that_can_be_suspended_keeps_its_process_through_a_preemption(lent: Lent) -> None:
    until(lent.guest.runs, "the idle GPU is lent", 300)
    pid, preempted = lent.guest.pid, lent.guest.get()["preemptions"]
    come_back(lent)
    until(lambda: lent.guest.get()["preemptions"] > preempted, "the job made way")
    until(lent.guest.runs, "it runs again", 300)
    assert (lent.guest.pid, lent.guest.get()["attempt"]) == (pid, 1)


def test_a_killed_seat_counts_as_an_eviction(lent: Lent) -> None:
    come_back(lent)
    seats = lent.story.seats_of(lease_of(lent))
    (seat,) = [pod for pod in seats if "deletionTimestamp" not in pod["metadata"]]
    process = lent.story.cluster.kubelet.running[seat["metadata"]["uid"]].process
    process.kill()
    until(lambda: lent.story.session("ada")["state"] == "suspended", "its session is suspended")
    works(lent)


def test_a_killed_helper_finds_what_it_had(lent: Lent) -> None:
    before = lent.beside.pid, lent.beside.get()["attempt"]
    come_back(lent)
    helper = lent.story.helpers[lent.node]
    helper.kill()
    helper.wait()
    start_helper(lent.story, lent.node)
    works(lent)
    assert (lent.beside.pid, lent.beside.get()["attempt"]) == before


def test_a_job_goes_on_while_the_pod_of_its_helper_is_replaced(lent: Lent) -> None:
    story, node = lent.story, lent.beside.node
    before = lent.beside.pid, lent.beside.get()["attempt"]
    helper = story.helpers[node]
    helper.kill()
    helper.wait()
    delete = story.cluster.server.store.delete
    story.cluster.do(lambda: delete("pods", NS, f"helper-{node}", grace_s=0))
    time.sleep(2 * GONE_S)
    helper_pod(story.cluster, node)
    start_helper(story, node)
    until(lambda: not story.trouble(), "the helper answers")
    assert lent.beside.runs()
    assert (lent.beside.pid, lent.beside.get()["attempt"]) == before
    works(lent)


def test_while_the_api_server_is_silent_work_goes_on_and_nothing_is_lent(lent: Lent) -> None:
    story = lent.story
    come_back(lent)
    begun = time.monotonic()
    story.cluster.server.freeze()
    try:
        # Before that it may say that a change of a seat, under way just then, has failed.
        until(lambda: any("nothing is lent" in said for said in story.trouble()), "health says it")
        while time.monotonic() < begun + 20:
            assert story.session("ada")["state"] == "running"
            time.sleep(0.5)
        assert story.cell("ada", "print(weights.is_intact())") == "True"
    finally:
        story.cluster.server.thaw()
    until(lambda: not story.trouble(), "health has nothing to say")
    works(lent)


def test_a_lost_node_ends_its_session_and_its_job_starts_on_another(lent: Lent) -> None:
    story = lent.story
    until(lent.guest.runs, "the job has the GPU of the idle session", 300)
    story.api("dot", "DELETE", f"jobs/{lent.beside.id}")
    gone = lent.node
    story.helpers[gone].kill()
    story.cluster.do(lambda: story.cluster.kubelet.lose(gone))
    until(lambda: not story.hub.server("ada"), "the Hub knows that the server has ended")
    until(lambda: not story.leases("ada"), "the session has ended")
    said = [d["sentence"] for d in story.api("ada", "GET", "decisions")["decisions"]]
    assert "Your session (1/2 GPU) has ended: the cluster lost its node." in said, said
    until(lambda: lent.guest.runs() and lent.guest.node != gone, "the job starts again elsewhere", 300)
    leases = {f"j{lent.guest.id}"}
    until(lambda: set(story.seats().values()) == leases, "no seat is left over")
