"""The package as people get it: its metadata, files and wheel, and what the README names."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import typer
from pip._vendor.packaging.requirements import Requirement

import oomb

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
SOURCES = {"oomb": "oomb", "assets": "oomb_assets", "widgets": "oomb_widgets"}
TOP_LEVEL = {
    *(".ci", ".gitattributes", ".github", ".gitignore", ".pre-commit-config.yaml"),
    *("LICENSE", "Makefile", "README.md", "pyproject.toml"),
    *("assets", "binder", "notebooks", "oomb", "tests", "widgets"),
}


def tracked_files() -> list[Path]:
    """Return the files of this project, relative to its root: those git has or would take."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to tell the project's files from others")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in names.split("\0") if name and (ROOT / name).is_file()]


def requirements(*extras: str) -> list[Requirement]:
    """Return what pyproject.toml asks for, with the named extras."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def normalised(name: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def code_of(path: Path) -> str:
    """Return the Python code of a module, or of a notebook's code cells without magics."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    lines = "\n".join("".join(cell["source"]) for cell in cells).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def imported(paths: list[Path]) -> dict[str, Path]:
    """Return every top-level name that the files import, with one file that does."""
    names = {}
    for path in paths:
        for node in ast.walk(ast.parse(code_of(path))):
            if isinstance(node, ast.Import):
                names.update((alias.name.split(".")[0], path) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names[node.module.split(".")[0]] = path
    return names


def test_installed_metadata_is_this_project():
    metadata = importlib.metadata.metadata("oomb")
    assert metadata["Version"] == PROJECT["version"] == oomb.__version__
    assert metadata["License-Expression"] == PROJECT["license"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}


def test_the_command_is_installed():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="oomb")
    assert isinstance(command.load(), typer.Typer)
    assert os.access(Path(sys.executable).parent / "oomb", os.X_OK)


@pytest.mark.parametrize("extra", ["fast", "lab", "test", "dev"])
def test_every_dependency_has_only_a_lower_bound(extra):
    bounds = {r.name: [part.operator for part in r.specifier] for r in requirements(extra)}
    bounds.pop("oomb", None)  # one extra that includes another
    assert {name: operators for name, operators in bounds.items() if operators != [">="]} == {}


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("oomb", ["fast"]),
        ("assets", []),
        ("widgets", ["lab"]),
        ("notebooks", ["lab"]),
        ("notebooks", ["test"]),
        ("tests", ["test"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_every_import_is_declared(folder, extras):
    paths = sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".ipynb"))
    own = {*SOURCES.values(), *(path.stem for path in (ROOT / "tests").glob("*.py"))}
    distributions = importlib.metadata.packages_distributions()
    declared = {normalised(requirement.name) for requirement in requirements(*extras)}
    declared.add("pip")  # in every virtual environment
    undeclared = {
        name: str(path.relative_to(ROOT))
        for name, path in imported(paths).items()
        if name not in sys.stdlib_module_names | own
        and not declared & {normalised(d) for d in distributions.get(name, [name])}
    }
    assert not undeclared


def test_every_package_is_listed():
    found = {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for folder, package in SOURCES.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert found == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_top_level_holds_only_the_usual():
    assert {path.parts[0] for path in tracked_files()} <= TOP_LEVEL


def test_readme_names_what_exists():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    commands = set(re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE))
    assert {"lab", "test"} <= commands <= targets
    links = re.findall(r"\]\((?!https?:)([^)#]+)", readme)
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_no_path_of_one_machine():
    home = re.compile(r"/(?:home|root|Users|mnt|tmp)/\w")
    offenders = []
    for path in tracked_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        if str(ROOT) + "/" in text or home.search(text):
            offenders.append(str(path))
    assert not offenders


def test_licence_is_the_whole_apache_licence():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_ci_runs_the_tests():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8").splitlines()
    subprocess.run(["bash", "-n", script], check=True)


def test_wheel_holds_code_and_data(tmp_path):
    sources = [path for path in tracked_files() if path.parts[0] in SOURCES]
    for path in [*sources, Path("pyproject.toml"), Path("README.md"), Path("LICENSE")]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    command = [sys.executable, "-c", build]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = (tmp_path / "dist").glob("oomb-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == {Path(SOURCES[path.parts[0]], *path.parts[1:]).as_posix() for path in sources}
    assert f"oomb-{PROJECT['version']}.dist-info/licenses/LICENSE" in names
