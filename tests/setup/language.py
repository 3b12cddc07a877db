"""Count words that say less than the field's own: ``python tests/setup/language.py [--list]``.

A comment that says "room" leaves open whether it means device memory, a free GPU or a place in
the queue.  The words below are counted in comments, docstrings and identifiers of Python, C and
TypeScript; texts for users are not counted.  A folder fails above `LIMIT` per 1,000 words of its
comments and docstrings.  Identifiers count once per file, split at underscores and capitals.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.setup import sources  # noqa: E402

PRONOUNS = frozenset({"who", "whom", "whose", "whoever", "nobody", "somebody", "anybody", "everybody"})
METAPHORS = frozenset({"room", "rooms", "hopeless", "thirsty", "burial", "undertaker", "morning", "mornings"})
COUNTED = PRONOUNS | METAPHORS
# Hits per 1,000 words of comments and docstrings; kopf and h11 have 0.1.
LIMIT = 1.0

_WORD = re.compile(r"[A-Za-z][A-Za-z']*")
_IDENTIFIER_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Stable values of the REST interface and of the helper's, and the Unix account: these are their names.
_NAMES = ("NOBODY",)
_STABLE = re.compile(rf"\b(?:{'|'.join((*_NAMES, *(name.lower() for name in _NAMES if '_' in name)))})\b")
# The files that list the counted words.
_EXEMPT = frozenset({"tests/setup/language.py", "tests/setup/test_language.py"})


@dataclass(frozen=True, slots=True)
class Hit:
    """A counted word and where it stands."""

    path: Path
    line: int
    word: str
    text: str


@dataclass(slots=True)
class Count:
    """What was found in one folder."""

    words: int = 0
    hits: list[Hit] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Hits per 1,000 words; infinite where there are hits and no words."""
        if not self.hits:
            return 0.0
        return 1000 * len(self.hits) / self.words if self.words else float("inf")


def counted_in_prose(text: str) -> Iterator[tuple[int, str]]:
    """Each counted word of a comment with the number of line breaks before it."""
    for match in _WORD.finditer(_STABLE.sub(lambda match: "-" * len(match.group()), text)):
        if (word := match.group().lower().removesuffix("'s")) in COUNTED:
            yield text.count("\n", 0, match.start()), word


def counted_in_identifier(name: str) -> list[str]:
    """The counted words in an identifier: ``whoWaits`` and ``_ROOM`` have one each."""
    if name in _NAMES:
        return []
    return [part.lower() for part in _IDENTIFIER_PART.findall(name) if part.lower() in COUNTED]


def count(root: Path) -> dict[str, Count]:
    """Words and hits by folder for every source file below ``root``.

    Raises:
        SyntaxError: a Python file does not parse.
    """
    found: dict[str, Count] = defaultdict(Count)
    for path in sources.paths(root):
        if str(path.relative_to(root)) in _EXEMPT:
            continue
        source = sources.read(path, root)
        folder = found[source.folder]
        for text in source.prose:
            folder.words += len(_WORD.findall(text.text))
            lines = text.text.splitlines()
            for below, word in counted_in_prose(text.text):
                folder.hits.append(Hit(path, text.line + below, word, lines[below].strip()))
        for name in source.identifiers:
            for word in counted_in_identifier(name.text):
                folder.hits.append(Hit(path, name.line, word, name.text))
    return dict(sorted(found.items()))


def table(counts: dict[str, Count]) -> str:
    """The counts as lines of a table, one folder a line, those above `LIMIT` marked."""
    lines = [f"{'folder':<42} {'words':>6} {'hits':>5} {'per 1,000':>9}"]
    for folder, each in counts.items():
        mark = "  above the limit" if each.rate > LIMIT else ""
        lines.append(f"{folder:<42} {each.words:>6} {len(each.hits):>5} {each.rate:>9.1f}{mark}")
    total = Count(sum(each.words for each in counts.values()), [h for c in counts.values() for h in c.hits])
    lines.append(f"{'all':<42} {total.words:>6} {len(total.hits):>5} {total.rate:>9.1f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, with ``--list`` each place; 1 when a folder is above `LIMIT`, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="checkout to read")
    parser.add_argument("--list", action="store_true", help="print every place as well")
    parser.add_argument("--folder", default="", help="only folders whose name begins with this")
    parser.add_argument("--report", action="store_true", help="never fail")
    options = parser.parse_args(arguments)
    counts = {name: each for name, each in count(options.root).items() if name.startswith(options.folder)}
    above = {name: each for name, each in counts.items() if each.rate > LIMIT}
    print(table(counts))
    listed = counts if options.list else {} if options.report else above
    for each in listed.values():
        for hit in sorted(each.hits, key=lambda hit: (hit.path, hit.line)):
            print(f"{hit.path.relative_to(options.root)}:{hit.line}: {hit.word}: {hit.text}")
    if above:
        print(
            f"Above {LIMIT:g} per 1,000 words: {', '.join(above)}.  Name the thing: capacity, limit, queue."
        )
    return 1 if above and not options.report else 0


if __name__ == "__main__":
    sys.exit(main())
