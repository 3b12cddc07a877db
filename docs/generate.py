"""Write the pages that are drawn from the code: ``python docs/generate.py``.

`PAGES` says which page comes from which function.  ``tests/docs`` compares the
files with what the functions return, so a page cannot fall behind the code.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from jupyter_gpushare.core.model import HOLDS_ROOM, TRANSITIONS, Event, State

DOCS = Path(__file__).resolve().parent
# An event that is possible in so many states is told in a sentence, or the drawing is all arrows.
EVERYWHERE = 5

MEANINGS: Mapping[State, str] = {
    State.PENDING: "waits for room",
    State.GRANTED: "room is reserved; its processes are being started",
    State.RUNNING: "has its room, whether it computes or idles",
    State.SUSPENDING: "its GPU memory is being copied to RAM",
    State.SUSPENDED: "asleep: its processes live, its GPU memory lies in RAM, its room is lent or free",
    State.RESUMING: "its room is free again; its GPU memory is being copied back",
    State.STOPPING: "told to end, within its time of grace; its room is on its way out",
    State.RELEASED: "over",
    State.FAILED: "could not be started, or was given up",
}


def lease_page() -> str:
    """``docs/lease.md``: every state and every arrow of `TRANSITIONS`."""
    ways: dict[Event, list[tuple[State, State]]] = defaultdict(list)
    for (state, event), after in TRANSITIONS.items():
        ways[event].append((state, after))
    drawn = {event: pairs for event, pairs in ways.items() if len(pairs) < EVERYWHERE}
    told = {event: pairs for event, pairs in ways.items() if len(pairs) >= EVERYWHERE}
    arrows = [
        f"    {before} --> {after}: {event}"
        for event in Event
        for before, after in sorted(drawn.get(event, ()))
    ]
    sentences = []
    for event, pairs in told.items():
        targets = " or ".join(f"`{state}`" for state in sorted({after for _, after in pairs}))
        sources = ", ".join(f"`{state}`" for state in State if state in {before for before, _ in pairs})
        sentences.append(f"* `{event}` leads to {targets}; it is possible in {sources}.")
    rows = [
        f"| `{state}` | {MEANINGS[state]} | {'yes' if state in HOLDS_ROOM else 'no'} |" for state in State
    ]
    final = [
        f"    {state} --> [*]" for state in State if not any(before == state for before, _ in TRANSITIONS)
    ]
    return "\n".join(
        [
            "<!-- Written by docs/generate.py from jupyter_gpushare.core.model.TRANSITIONS; do not edit. -->",
            "# The life of a lease",
            "",
            "A lease is the right of one workload, a build session or a training job, to a part of the GPUs.",
            "Whatever is not drawn or listed here cannot happen: the broker refuses it.",
            "",
            "```mermaid",
            "stateDiagram-v2",
            f"    [*] --> {State.PENDING}",
            *arrows,
            *final,
            "```",
            "",
            "Left out of the drawing, because they are possible almost everywhere:",
            "",
            *sentences,
            "",
            "| state | meaning | holds device memory |",
            "|---|---|---|",
            *rows,
            "",
            "A suspended lease holds host memory instead of device memory. A build session within its",
            "project's quota keeps its claim on the device in every state but the last two.",
            "",
        ]
    )


PAGES: Mapping[str, Callable[[], str]] = {"lease.md": lease_page}


def main() -> int:
    """Write every page that differs and name it; exit code 0."""
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(DOCS.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
