from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import msgspec

from jupyter_gpushare.hub.picker import NO_OFFERS, render
from jupyter_gpushare.protocol.wire import Offers
from tests.hub.fake_broker import offers


class Page(HTMLParser):
    """Inputs, tags and text of a piece of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.inputs: list[dict[str, str | None]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "input":
            self.inputs.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data

    def radios(self, name: str) -> list[dict[str, str | None]]:
        return [each for each in self.inputs if each.get("type") == "radio" and each["name"] == name]


def offered(project: str = "vision", projects: list[str] | None = None, **changes: Any) -> Offers:
    return msgspec.convert({**offers(project, projects or [project]), **changes}, Offers)


def page(*all_offers: Offers, last: dict[str, Any] | None = None, trouble: str = "") -> Page:
    return Page(render(all_offers, last=last or {}, trouble=trouble))


def checked(found: Page, project: str = "vision") -> list[str | None]:
    return [radio["value"] for radio in found.radios(f"gpushare_size:{project}") if "checked" in radio]


def test_every_offer_is_a_radio_button_and_no_gpu_is_always_one() -> None:
    values = [radio["value"] for radio in page(offered()).radios("gpushare_size:vision")]
    assert values == ['{"fraction": "1/2"}', '{"gpus": 2}', '{"gpus": 0}', "memory"]


def test_a_size_that_cannot_start_is_disabled_with_its_reason() -> None:
    found = page(offered())
    assert ["disabled" in radio for radio in found.radios("gpushare_size:vision")] == [
        False,
        True,
        False,
        False,
    ]
    assert "Only 1 GPU is free." in found.text


def test_cards_say_memory_device_time_and_promise() -> None:
    text = " ".join(page(offered()).text.split())
    assert "1/2 GPU 40 GiB of H100-80GB starts now guaranteed" in text


def test_a_card_of_a_size_that_several_models_may_serve_says_both_amounts() -> None:
    later = {"device": "A100-40GB or H100-80GB", "memory_bytes": 20 << 30, "memory_most_bytes": 40 << 30}
    both = offers("vision", ["vision"])["offers"]
    text = " ".join(page(offered(offers=[both[0], {**both[1], **later}])).text.split())
    assert "2 GPUs 20 GiB to 40 GiB of A100-40GB or H100-80GB" in text


def test_the_last_choice_is_preselected_however_it_was_written() -> None:
    for fraction in ("1/2", "0.5", 0.5):
        assert checked(page(offered(), last={"fraction": fraction, "project": "vision"})) == [
            '{"fraction": "1/2"}'
        ]


def test_a_last_choice_that_cannot_start_now_gives_no_gpu() -> None:
    assert checked(page(offered(), last={"gpus": 2})) == ['{"gpus": 0}']


def sizes(*shown: tuple[dict[str, Any], int, str, bool]) -> Offers:
    """Offers of (options, memory in GiB, start, guaranteed)."""
    return offered(
        offers=[
            {
                "label": str(options),
                "options": options,
                "memory_bytes": memory_gib << 30,
                "starts": starts,
                "guaranteed": guaranteed,
                "reason": "",
                "device": "H100-80GB",
            }
            for options, memory_gib, starts, guaranteed in shown
        ]
    )


def test_a_first_visit_preselects_the_largest_guaranteed_fraction_that_starts_now() -> None:
    shown = sizes(
        ({"fraction": "0.25"}, 20, "now", True),
        ({"fraction": "0.5"}, 40, "now", True),
        ({"gpus": 1}, 80, "now", True),
        ({"gpus": 2}, 160, "now", False),
    )
    assert checked(page(shown)) == ['{"fraction": "0.5"}']


def test_a_first_visit_preselects_nothing_that_is_borrowed_or_has_to_wait() -> None:
    shown = sizes(
        ({"fraction": "0.25"}, 20, "soon", True),
        ({"fraction": "0.5"}, 40, "now", False),
        ({"gpus": 1}, 80, "no", True),
    )
    assert checked(page(shown)) == ['{"gpus": 0}']


def test_a_first_visit_preselects_the_smallest_size_where_gpus_are_not_shared() -> None:
    shown = sizes(({"profile": "1g.10gb"}, 10, "now", True), ({"profile": "3g.40gb"}, 40, "now", True))
    assert checked(page(shown)) == ['{"profile": "1g.10gb"}']


def test_no_lending_is_told_of_where_nothing_is_lent() -> None:
    mig = ({"profile": "1g.10gb"}, 10, "now", True)
    assert "is lent" not in page(msgspec.structs.replace(sizes(mig), idle_timeout_s=0.0)).text
    assert "MIG instances are never lent" in page(sizes(mig, ({"fraction": "0.5"}, 40, "now", True))).text
    assert "MIG" not in page(sizes(({"fraction": "0.5"}, 40, "now", True))).text


def test_a_choice_of_no_gpu_is_remembered() -> None:
    assert checked(page(offered(), last={"gpus": 0})) == ['{"gpus": 0}']


def test_an_exact_amount_of_last_time_is_filled_in() -> None:
    found = page(offered(), last={"memory": "20GiB"})
    assert checked(found) == ["memory"]
    (field,) = [each for each in found.inputs if each["name"] == "gpushare_memory:vision"]
    assert field["value"] == "20"


def test_garbage_from_last_time_does_no_harm() -> None:
    for last in ({"fraction": ["x"]}, {"gpus": {"a": 1}}, {"memory": 7}, {"project": 3}):
        assert len(checked(page(offered(), last=last))) == 1


def test_without_offers_there_is_a_reason_and_the_card_without_gpu() -> None:
    found = page(trouble=NO_OFFERS)
    assert NO_OFFERS in found.text
    assert [radio["value"] for radio in found.radios("gpushare_size:")] == ['{"gpus": 0}']


def test_a_member_of_several_projects_chooses_one() -> None:
    both = ["nlp", "vision"]
    found = page(offered("nlp", both), offered("vision", both), last={"fraction": "1/2", "project": "vision"})
    (selected,) = [attrs for tag, attrs in found.tags if tag == "option" and "selected" in attrs]
    assert selected["value"] == "vision"
    assert len(checked(found, "nlp")) == len(checked(found, "vision")) == 1


def test_it_works_without_javascript() -> None:
    asked = offers("vision", ["vision"])
    asked["offers"][1]["waits"] = True
    found = page(msgspec.convert(asked, Offers))
    assert ["disabled" in radio for radio in found.radios("gpushare_size:vision")][1]
    (place,) = [attrs for _, attrs in found.tags if attrs.get("class") == "gpushare-place"]
    assert "hidden" in place


def test_every_radio_has_a_name_and_a_description_for_screen_readers() -> None:
    found = page(offered())
    ids = {attrs["id"] for _, attrs in found.tags if "id" in attrs}
    labelled = {attrs["for"] for tag, attrs in found.tags if tag == "label"}
    for radio in found.radios("gpushare_size:vision"):
        assert radio["id"] in labelled
        for reference in ("aria-labelledby", "aria-describedby"):
            assert radio.get(reference) is None or radio[reference] in ids
    (group,) = [attrs for tag, attrs in found.tags if tag == "fieldset"]
    assert group["role"] == "radiogroup"
    assert group["aria-labelledby"] in ids


def test_hostile_names_stay_text() -> None:
    evil = '"><script>alert(1)</script>'
    found = page(offered(evil, [evil, "b"]), offered("b", [evil, "b"]), last={"memory": evil}, trouble=evil)
    assert [tag for tag, _ in found.tags].count("script") == 1  # our own
    assert "onload" not in {key for _, attrs in found.tags for key in attrs}
    assert evil in found.text


def test_the_bar_adds_up_and_says_the_same_in_words() -> None:
    found = page(offered())
    widths = [
        float((attrs["style"] or "").partition(":")[2].strip(" %"))
        for tag, attrs in found.tags
        if tag == "div" and "progress-bar" in (attrs.get("class") or "")
    ]
    assert sum(widths) == 100
    assert "0.5 GPUs in use, 1 guaranteed" in found.text


def test_a_machine_without_gpus_has_no_bar() -> None:
    found = page(offered(offers=[], total_milli=0, free_milli=0))
    assert not [1 for _, attrs in found.tags if "progress" in (attrs.get("class") or "")]
    assert checked(found) == ['{"gpus": 0}']
