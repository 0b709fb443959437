"""The `oomb` command."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import oomb
from oomb.cli import app
from oomb.cli.common import write_json


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"oomb {oomb.__version__}\n")


def test_help_names_every_verb_and_option():
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert "demo" in result.stdout
    options = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "100"}).stdout
    for name in (
        "text",
        "model",
        "context",
        "chunk",
        "page",
        "steps",
        "lr",
        "device",
        "json",
        "out",
    ):
        assert f"--{name}" in options


def test_an_unknown_verb_is_exit_code_2():
    assert CliRunner().invoke(app, ["dmeo"]).exit_code == 2


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "oomb.cli", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"oomb {oomb.__version__}\n"


def test_json_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("before")
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert path.read_text() == "before"
    write_json(path, {"x": 1.5})
    assert path.read_text() == '{\n "x": 1.5\n}\n'
    assert list(tmp_path.iterdir()) == [path]
