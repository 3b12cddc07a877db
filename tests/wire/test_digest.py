"""Digests of messages."""

from __future__ import annotations

from jupyter_gpushare.protocol import wire


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
