"""`%gpu` and `%gpujob` in a real IPython, with a broker that answers golden messages."""

from __future__ import annotations

import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from jupyter_gpushare.cli.magics import submit_words


@pytest.fixture
def shell(broker, monkeypatch):
    monkeypatch.setenv("GPUSHARE_API_URL", broker.url)
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "token-of-ada")
    monkeypatch.delenv("GPUSHARE_API_TOKEN", raising=False)
    monkeypatch.setenv("JUPYTERHUB_SERVER_NAME", "")
    # No history: it would be a database in the developer's home.
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "jupyter_gpushare")
    yield shell
    InteractiveShell.clear_instance()


def test_gpu_shows_the_lease_of_this_server(shell, capsys):
    shell.run_cell("%gpu")
    assert capsys.readouterr().out == (
        "1/2 GPU of H100-80GB: 6.8 GiB of 40 GiB, Active\nYour 1/2 GPU is in use.\n"
    )


def test_gpu_says_when_there_is_nothing_to_show(shell, broker, golden, monkeypatch, capsys):
    broker.say_status(golden("status_empty"))
    shell.run_cell("%gpu")
    assert capsys.readouterr().out == "This server has no GPU.\n"
    monkeypatch.setattr("jupyter_gpushare.client.RETRY_S", 0.0)
    broker.stop()
    monkeypatch.setenv("GPUSHARE_API_URL", "")
    shell.run_cell("%gpu")
    assert "without a GPU broker" in capsys.readouterr().out
    broker.start()


def test_gpujob_submits_like_the_command_line(shell, broker, golden, capsys):
    broker.answer("POST jobs", golden("job"), 201)
    shell.run_cell("%gpujob --gpus 2 --name night -- python train.py --lr 0.1")
    (asked,) = broker.asked("POST jobs")
    assert asked.json["command"] == ["python", "train.py", "--lr", "0.1"]
    assert (asked.json["gpus"], asked.json["name"]) == ("2", "night")
    assert "k3v9m2x7qa" in capsys.readouterr().out


def test_a_cell_becomes_the_job(shell, broker, golden):
    broker.answer("POST jobs", golden("job"), 201)
    shell.run_cell("%%gpujob --gpus 0.5 --share yes\nfor n in range(2):\n    print(n)\n")
    (asked,) = broker.asked("POST jobs")
    assert asked.json["command"] == [sys.executable, "-u", "-c", "for n in range(2):\n    print(n)\n"]
    assert (asked.json["gpus"], asked.json["name"], asked.json["share"]) == ("0.5", "cell", True)


def test_wrong_usage_is_said_and_ends_nothing(shell, broker, capsys):
    shell.run_cell("%gpujob --sideways")
    assert "unrecognized arguments: --sideways" in capsys.readouterr().err
    shell.run_cell("print('still here')")
    assert capsys.readouterr().out == "still here\n"
    assert not broker.asked("POST jobs")


def test_errors_name_the_magic_that_was_typed(shell, broker, capsys):
    shell.run_line_magic("gpujob", "")
    said = capsys.readouterr().err
    assert "%gpujob: error: what is to run?" in said
    assert "like: %gpujob -- python train.py" in said
    assert "gpushare" not in said
    broker.answer("POST jobs", {"status": 409, "reason": "no_capacity", "message": "Nothing is free."}, 409)
    shell.run_cell_magic("gpujob", "", "print(1)")
    assert capsys.readouterr().err == "%%gpujob: Nothing is free.\n"


def test_a_line_that_cannot_be_taken_apart_is_said(shell, broker, capsys):
    shell.run_line_magic("gpujob", "--name it's -- python train.py")
    assert "No closing quotation" in capsys.readouterr().err
    assert not broker.asked("POST jobs")


def test_the_words_of_a_magic_are_those_of_submit():
    assert submit_words("--gpus 1 --name 'a b'", "x") == [
        *["submit", "--name", "cell", "--gpus", "1", "--name", "a b", "--"],
        *[sys.executable, "-u", "-c", "x"],
    ]


@pytest.mark.parametrize("line", ["--name=night --gpus 0.5", "--gpus 0.5 --name night"])
def test_a_cell_is_called_what_its_line_says(shell, broker, golden, line):
    broker.answer("POST jobs", golden("job"), 201)
    shell.run_cell(f"%%gpujob {line}\nprint(1)\n")
    (asked,) = broker.asked("POST jobs")
    assert (asked.json["gpus"], asked.json["name"]) == ("0.5", "night")
