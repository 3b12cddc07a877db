from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpushare.core.size import MAX_GPUS
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.hub.options import from_form, read, split_form, ticket
from jupyter_gpushare.protocol.wire import GpuRequest


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"fraction": "1/2"}, GpuRequest(fraction="1/2")),
        ({"fraction": "0.5", "project": "nlp"}, GpuRequest(fraction="0.5", project="nlp")),
        ({"fraction": 0.25}, GpuRequest(fraction="0.25")),
        ({"fraction": 1}, GpuRequest(fraction="1")),
        ({"memory": "20GiB"}, GpuRequest(memory="20GiB")),
        ({"profile": "1g.10gb"}, GpuRequest(profile="1g.10gb")),
        ({"gpus": 2}, GpuRequest(gpus=2)),
        ({"gpus": 0}, None),
        ({}, None),
        (None, None),
    ],
)
def test_what_a_user_may_ask_for_is_understood(given: Any, meant: GpuRequest | None) -> None:
    assert read({"gpushare": given}) == meant


def test_options_without_ours_ask_for_no_gpu() -> None:
    assert read({"image": "x"}) is None


@pytest.mark.parametrize(
    "given",
    [
        {"fraction": math.nan},
        {"fraction": math.inf},
        {"fraction": True},
        {"fraction": "1e-9"},
        {"fraction": "0"},
        {"fraction": "-1"},
        {"fraction": "1.5"},
        {"fraction": "nan"},
        {"fraction": "1/0"},
        {"fraction": "lots"},
        {"fraction": "0.00033"},
        {"fraction": ["0.5"]},
        {"gpus": -1},
        {"gpus": "2"},
        {"gpus": 1, "fraction": "0.5"},
        {"unknown": 1},
        {"project": "vision"},
        "half",
        ["0.5"],
        {"fraction": ""},
        {"fraction": "1/2", "memory": "1GiB"},
        {"gpus": True},
        {"gpus": 1.5},
        {"gpus": MAX_GPUS + 1},
        {"memory": "\uff12\uff10GiB"},  # digits, but not of ASCII
        {"fraction": "\u0660.\u0665"},
        {"profile": "the fast one"},
        {"gpus": 10**40},
        {"memory": ""},
        {"profile": ""},
        {"profile": "1g.10gb", "gpus": 1},
        {"memory": "1" * 100},
        {"memory": 20},
        {"fraction": "1", "project": "a\nb"},
        {"fraction": "1", "project": ["nlp"]},
        {"fraction": "1", "file": b"bytes"},
        {1: 2},
        7,
    ],
    ids=repr,
)
def test_nonsense_gets_a_sentence(given: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read({"gpushare": given})
    assert len(str(caught.value)) > 20


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["fraction", "gpus"]), inner)
        ),
        max_leaves=8,
    )
)
def test_whatever_is_sent_is_read_or_refused(given: Any) -> None:
    try:
        request = read({"gpushare": given})
    except InvalidRequest:
        return
    assert request is None or isinstance(request, GpuRequest)


def test_the_fields_of_the_site_are_kept_apart_from_ours() -> None:
    form = {"image": ["x"], "gpushare_project": ["nlp"], "gpushare_size:nlp": ["{}"], "gpushare_sizes": ["y"]}
    ours, site = split_form(form)
    assert site == {"image": ["x"], "gpushare_sizes": ["y"]}
    assert set(ours) == {"gpushare_project", "gpushare_size:nlp"}


def test_the_size_of_the_chosen_project_counts() -> None:
    form = {
        "gpushare_project": ["nlp"],
        "gpushare_size:vision": [json.dumps({"gpus": 2})],
        "gpushare_size:nlp": [json.dumps({"fraction": "1/2"})],
    }
    assert from_form(form) == {"fraction": "1/2", "project": "nlp"}


def test_no_gpu_names_no_project() -> None:
    assert from_form({"gpushare_project": ["nlp"], "gpushare_size:nlp": ['{"gpus": 0}']}) == {"gpus": 0}


def test_nothing_chosen_is_no_gpu() -> None:
    assert from_form({"gpushare_project": ["nlp"]}) == {"gpus": 0}


@pytest.mark.parametrize(
    ("typed", "memory"), [("20", "20GiB"), (" 2.5 ", "2.5GiB"), ("20MB", "20MB"), ("", "")]
)
def test_an_exact_amount_without_unit_is_in_the_unit_beside_it(typed: str, memory: str) -> None:
    form = {"gpushare_project": [""], "gpushare_size:": ["memory"], "gpushare_memory:": [typed]}
    assert from_form(form) == {"memory": memory}


@pytest.mark.parametrize("value", ["[]", "lots", '"x"', "[" * 100_000])
def test_a_size_that_is_no_card_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="not a size"):
        from_form({"gpushare_size:": [value]})


def test_a_ticket_is_a_short_text_or_none():
    assert ticket({"gpushare_start": "7.mac"}) == "7.mac"
    for other in ({}, {"gpushare_start": 7}, {"gpushare_start": ["7"]}, {"gpushare_start": "7" * 1_000}):
        assert ticket(other) == ""
