"""The documentation says what the code does: generated pages are current, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.settings import BrokerTraits
from jupyter_gpushare.core.model import TRANSITIONS
from tests.gpu_real.order import PARTS

# ---- docs/first-gpu.md names every scenario of `make test-gpu`, in the order in which they run

FIRST_GPU = Path(__file__).resolve().parents[2] / "docs" / "first-gpu.md"


def test_the_page_has_every_scenario_in_its_order():
    rows = re.findall(r"^\| (\d) \| (.*?) \|", FIRST_GPU.read_text(), re.MULTILINE)
    named = [(int(part), name) for part, row in rows for name in re.findall(r"`([a-z]\w*)`", row)]
    first = {}
    for number, part in enumerate(PARTS, 1):
        for scenario in part:
            first.setdefault(scenario.function.__name__, number)
    assert sorted(named) == sorted((part, name) for name, part in first.items())
    numbers = [next(n for n, (_, row) in enumerate(rows) if f"`{name}`" in row) for name in first]
    assert numbers == sorted(numbers)


# ---- docs/concepts.md says the order of jobs in few words

CONCEPTS = FIRST_GPU.with_name("concepts.md")


def test_the_scheduling_order_stays_short():
    section = CONCEPTS.read_text().partition("## Scheduling order")[2].partition("\n## ")[0]
    rules = re.findall(r"^\d+\. .*$", section, re.MULTILINE)
    assert len(section.split()) <= 700
    assert len(rules) > 9
    assert max(len(rule.split()) for rule in rules) <= 60


# ---- docs/security.md says of each spawner what it keeps apart

SECURITY = FIRST_GPU.with_name("security.md")


def test_the_page_says_of_every_spawner_that_is_shipped_what_it_keeps_apart():
    section = SECURITY.read_text().partition("## What each spawner keeps apart")[2].partition("\n## ")[0]
    project = tomllib.loads((SECURITY.parents[1] / "pyproject.toml").read_text())["project"]
    shipped = project["entry-points"]["jupyterhub.spawners"]
    assert sorted(re.findall(r"^\| `(gpushare-\w+)`", section, re.MULTILINE)) == sorted(shipped)


# ---- docs/architecture.md counts the rooms of a start, and the files of an option of a job

ARCHITECTURE = FIRST_GPU.with_name("architecture.md")
PACKAGE = Path(__file__).resolve().parents[2] / "jupyter_gpushare"


def test_a_start_passes_few_rooms_and_seldom_returns():
    section = ARCHITECTURE.read_text().partition("### A server starts with")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", section, re.MULTILINE)
    rooms = [room for room, _ in rows]
    returns = len(rooms) - len(set(rooms))
    assert f"{len(set(rooms))} modules, with {returns} returns" in section
    assert len(set(rooms)) <= 13
    assert returns <= 4
    for room, told in rows:
        for function in re.findall(r"^`(\w+)`", told):
            assert f"def {function}(" in (PACKAGE / room).read_text(), (room, function)


def test_an_option_of_a_job_touches_few_files():
    section = ARCHITECTURE.read_text().partition("## What a new option")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [\w ,`]+ \((\d+)\) \| (.*) \|$", section, re.MULTILINE)
    for count, files in rows:
        assert int(count) == len(re.findall(r"`[\w/]+\.\w+`|one migration", files))
        for name in re.findall(r"`([\w/]+\.(?:py|tsx?))`", files):
            assert re.search(r"\bborrow\b", (PACKAGE / name).read_text()), name
    total = sum(int(count) for count, _ in rows)
    assert f"{total} files by hand" in section
    assert total <= 18


# ---- docs/operations.md lists what a reload of the broker does not change ----

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def test_the_page_names_each_setting_that_a_reload_does_not_change():
    names = {
        name
        for name, trait in GPUShareBroker.class_traits(config=True).items()
        if trait.this_class in (GPUShareBroker, BrokerTraits)
    }
    read: set[str] = set()

    class Recording(GPUShareBroker):
        def __getattribute__(self, name: str) -> object:
            read.add(name)
            return super().__getattribute__(name)

    broker = Recording()
    read.clear()
    broker.policy()
    broker.receivers()
    assert {"projects", "idle_timeout", "lending"} < read
    section = (
        OPERATIONS.read_text().partition("## Change settings without a restart")[2].partition("\n## ")[0]
    )
    (listed,) = re.findall(r"At a restart only: (.*?)\.", section)
    assert set(re.findall(r"`(\w+)`", listed)) == names - read


# ---- test pages --------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(generator().PAGES))
def test_generated_page_is_what_the_code_says_today(name):
    assert (ROOT / "docs" / name).read_text() == generator().PAGES[name](), "run: python docs/generate.py"


def test_every_arrow_of_a_lease_is_drawn_or_told():
    page = generator().lease_page()
    told = dict(re.findall(r"^\* `(\w+)` leads to .*?; it is possible in (.*)\.$", page, re.MULTILINE))
    for (state, event), after in TRANSITIONS.items():
        drawn = f"    {state} --> {after}: {event}\n" in page
        assert drawn or f"`{state}`" in told.get(event, ""), (state, event)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    text = page.read_text()
    for target in [*re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text), *pictures_of(text)]:
        if "://" not in target:
            assert (page.parent / target).exists(), target


def pictures_of(text: str) -> list[str]:
    return re.findall(r' (?:src|srcset)="([^"]+)"', text)


def test_every_picture_is_shown_on_a_page_in_the_light_and_in_the_dark():
    shown = {(page.parent / name).resolve() for page in PAGES for name in pictures_of(page.read_text())}
    assert {str(path.name) for path in (ROOT / "docs" / "images").glob("*.png") if path not in shown} == set()
    assert all(path.with_name(path.name.replace("-light", "-dark")) in shown for path in shown)


def test_every_layer_of_every_contract_is_in_the_picture():
    drawn = set(re.findall(r"<text [^>]*>([^<]+)</text>", generator().layers_picture()))
    words = {word.rpartition(".")[2] for text in drawn for word in text.replace("|", " ").split()}
    layers = generator().layers_of(ROOT / "pyproject.toml")
    assert len(layers) >= 4
    assert {name for rows in layers.values() for row in rows for name in row} <= words


def quoted_texts() -> list[str]:
    """The pieces of error texts that docs/troubleshooting.md promises, without their gaps."""
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quotes = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]
    pieces = [piece.strip(" ;:,()") for quote in quotes for piece in quote.split("...")]
    return sorted({piece for piece in pieces if len(piece) > 8})


@pytest.fixture(scope="module")
def all_texts() -> str:
    """Every string of package, demo and Makefile, on one line; what is filled in reads as a blank."""
    words = [(ROOT / "Makefile").read_text(), (ROOT / "tests" / "conftest.py").read_text()]
    for path in (*(ROOT / "jupyter_gpushare").rglob("*.py"), *(ROOT / "demo").glob("*.py")):
        # Adjacent literals and the line breaks between them read as one text.
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        words.append(re.sub(r"\{[^{}\n]*\}|%\d", " ", text))
    return re.sub(r"\s+", " ", " ".join(words))


@pytest.mark.parametrize("piece", quoted_texts())
def test_an_error_text_in_the_troubleshooting_page_exists(all_texts, piece):
    numberless = re.sub(r"\b\d{3,}\b", " ", piece)
    assert any(re.sub(r"\s+", " ", text).strip() in all_texts for text in (piece, numberless))
