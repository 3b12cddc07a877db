"""The client without `await`: the same requests and errors, also where an event loop runs already."""

from __future__ import annotations

import threading
import time

import pytest

from jupyter_gpushare.client import BlockingClient
from jupyter_gpushare.errors import BrokerUnavailable, NotAllowed
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
