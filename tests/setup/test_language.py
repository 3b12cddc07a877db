"""The language check finds its words where developers write them, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.setup import language

PROSE = " ".join(["capacity"] * 1200)


def write(root: Path, name: str, code: str) -> Path:
    path = root / "jupyter_gpushare" / "core" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    return path


def words_found(root: Path) -> list[str]:
    return sorted(hit.word for each in language.count(root).values() for hit in each.hits)


def check(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, language.__file__, str(root), *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("a.py", '"""The job that waits.\n\nNobody else runs."""\n', ["nobody"]),
        ("a.py", "x = 1  # whose device it is\n", ["whose"]),
        ("a.py", "x = 1  # Nobody, nobody\n", ["nobody", "nobody"]),
        ("a.py", "def find_room(who_asks): ...\n", ["room", "who"]),
        ("a.py", "class HopelessJob:\n    somebody: int\n", ["hopeless", "somebody"]),
        ("a.c", "/* Who holds\n * the room */\nint n;\n", ["room", "who"]),
        ("a.c", "static int makeRoom(void) { return 0; } // everybody's\n", ["everybody", "room"]),
        ("a.tsx", "const roomLeft = /a'b/; // morning\nconst x = `who`;\n", ["morning", "room"]),
    ],
)
def test_a_counted_word_is_found_in_comments_docstrings_and_identifiers(tmp_path, name, code, words):
    write(tmp_path, name, code)
    assert words_found(tmp_path) == words


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("a.py", 'text = "Nobody is waiting"\n'),
        ("a.py", "headroom = whole = 1  # headroom, wholesale, roommate\n"),
        ("a.py", "from x import room\nroom.take()\n"),
        ("a.py", 'NOBODY = 65534  # as "NOBODY"\n'),
        ("a.c", 'char *text = "// who /* whom */";\n'),
        ("a.ts", "const url = 'http://who'; const pattern = /room's/;\n"),
    ],
)
def test_texts_for_users_longer_words_and_names_of_other_modules_are_not_counted(tmp_path, name, code):
    write(tmp_path, name, code)
    assert words_found(tmp_path) == []


def test_a_folder_above_the_limit_fails_and_its_places_are_named(tmp_path):
    path = write(tmp_path, "a.py", f'"""{PROSE}"""\n# one room\n')
    assert check(tmp_path).returncode == 0
    path.write_text(f'"""{PROSE}"""\n# one room\n# for whom\n')
    result = check(tmp_path)
    assert result.returncode == 1
    assert "jupyter_gpushare/core/a.py:3: whom: for whom" in result.stdout
    assert "jupyter_gpushare/core " in result.stdout


def test_hits_of_one_folder_are_not_thinned_by_the_words_of_another(tmp_path):
    write(tmp_path, "a.py", f'"""{PROSE}"""\n')
    other = tmp_path / "jupyter_gpushare" / "gpu" / "b.py"
    other.parent.mkdir()
    other.write_text("# makes room\n")
    assert check(tmp_path).returncode == 1


def test_a_report_lists_every_place_and_never_fails(tmp_path):
    write(tmp_path, "a.py", "# makes room\n")
    result = check(tmp_path, "--report", "--list")
    assert result.returncode == 0
    assert "a.py:1: room: makes room" in result.stdout


# `make check` runs the same program.
@pytest.mark.long
def test_no_folder_of_this_checkout_is_above_the_limit():
    result = check(language.ROOT)
    assert result.returncode == 0, result.stdout
