"""Digests of messages."""

from __future__ import annotations

import msgspec

from jupyter_gpushare.protocol import wire


class Later(wire.JobSource, frozen=True):
    """What a later version may know."""

    cells: list[str] = []


class LaterRequest(wire.JobRequest, frozen=True):
    source: Later | None = None


def test_the_digest_of_a_request_is_that_of_what_it_says():
    plain = wire.JobRequest(command=["a"], env={"A": "1", "B": "2"})
    assert wire.digest(wire.replace(plain, env={"B": "2", "A": "1"}, retries=0, gpus="1")) == wire.digest(
        plain
    )
    others = [
        wire.replace(plain, **change)
        for change in (
            {"command": ["b"]},
            {"env": {}},
            {"retries": 1},
            {"gpus": "2"},
            {"source": wire.JobSource(path="a.py")},
        )
    ]
    assert len({wire.digest(each) for each in (plain, *others)}) == 6


def test_defaults_inside_a_field_do_not_count_either():
    body = b'{"command": ["a"], "source": {"path": "a.py"}}'
    whole = b'{"command": ["a"], "source": {"path": "a.py", "kernel": "", "parameters": {}}}'
    digests = {wire.digest(wire.decode(each, wire.JobRequest)) for each in (body, whole)}
    assert digests == {wire.digest(msgspec.json.decode(body, type=LaterRequest))}
    other = b'{"command": ["a"], "source": {"path": "a.py", "kernel": "x"}}'
    assert wire.digest(wire.decode(other, wire.JobRequest)) not in digests
