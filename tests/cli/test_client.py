"""The client without `await`: the same requests and errors, also where an event loop runs already."""

from __future__ import annotations

import threading
import time

import pytest

from jupyter_gpushare.client import BlockingClient
from jupyter_gpushare.errors import BrokerUnavailable, NotAllowed, NotSetUp
from jupyter_gpushare.protocol import wire


async def test_it_works_below_a_running_event_loop_as_in_a_notebook(broker, golden):
    threads = threading.active_count()
    client = BlockingClient(broker.url, "token-of-ada")
    assert client.get("status", wire.Status).user == golden("status_active")["user"]
    client.close()
    assert threading.active_count() == threads


def test_it_raises_what_the_asynchronous_client_raises(broker):
    client = BlockingClient(broker.url, "wrong", retry_s=0.0)
    with pytest.raises(NotAllowed):
        client.get("status", wire.Status)
    broker.stop()
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        client.get("status", wire.Status)
    broker.start()
    client.close()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (302, ""),  # the Hub, where the address lacks its base_url
        (404, "<h1>Not found</h1>"),
        (404, {"status": 404, "message": "Not Found"}),
        (404, {"status": 404, "reason": wire.NO_SUCH_PATH, "message": "there is no such path"}),
    ],
)
def test_an_address_without_the_api_is_no_answer_of_the_broker(broker, gpushare, status, said):
    broker.answers["GET status"] = (status, said)
    client = BlockingClient(broker.url, "token-of-ada")
    with pytest.raises(NotSetUp, match=rf"answers at {broker.url} \({status} for /\S+/status\)"):
        client.get("status", wire.Status)
    client.close()
    ran = gpushare("status")
    assert ran.code == 3
    assert broker.url in ran.err


def test_an_interrupt_leaves_no_request_behind(broker, monkeypatch):
    client = BlockingClient("http://127.0.0.1:9/services/gpushare/api/v1", "x", retry_s=60.0)

    def interrupt(self, timeout=None):
        time.sleep(0.1)  # the first attempt has failed: it waits for the next
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("concurrent.futures.Future.result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.get("status", wire.Status)
    began_at = time.monotonic()
    client.close()
    assert time.monotonic() - began_at < 30
