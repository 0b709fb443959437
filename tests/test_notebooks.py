"""The notebooks run from top to bottom here, and what is committed is what a viewer can show."""

import ast
import base64
import functools
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

nbformat = pytest.importorskip("nbformat", reason="needs Jupyter, of the extra 'test'")
from nbformat.v4 import new_code_cell, new_notebook, new_output  # noqa: E402

from oomb_assets import results_dir  # noqa: E402
from oomb_widgets.execute_notebooks import execute, main, strip  # noqa: E402
from oomb_widgets.verdict import NOT_YET  # noqa: E402

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = ["00_start_here", "02_chunk_recurrence", "04_kernels"]
LIMIT = 300_000  # bytes of a committed notebook


def _read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@functools.cache
def _execute(name):
    return execute(FOLDER / f"{name}.ipynb", timeout=300)


@pytest.fixture(params=NAMES)
def committed(request):
    return _read(request.param)


def _outputs(notebook):
    return [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]


def _pictures(notebook):
    return [o for o in _outputs(notebook) if "image/png" in o.get("data", {})]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_the_committed_pictures(name):
    fresh = _execute(name)
    assert not [o for o in _outputs(fresh) if o.output_type == "error"]
    # The sentences hold measured numbers, which differ between machines; what is drawn does not.
    assert [_kind(o) for o in _pictures(fresh)] == [_kind(o) for o in _pictures(_read(name))]


def _kind(picture):
    return re.split(r"[\d.:]", picture.data["text/plain"])[0]


def _printed(notebook):
    return "".join(o.get("text", "") for o in _outputs(notebook))


@pytest.mark.parametrize("which", [_read, _execute], ids=["committed", "executed"])
def test_the_engine_costs_what_notebook_02_says(which):
    """At most one forward more than ordinary training's three units; `selective` a little more."""
    text = _printed(which("02_chunk_recurrence"))
    keep, selective = (
        float(re.search(rf"^engine, {policy} +([\d.]+)$", text, re.MULTILINE)[1])
        for policy in ("keep", "selective")
    )
    assert 1.1 < keep < 1.34
    assert keep < selective < 1.67


@pytest.mark.parametrize("which", [_read, _execute], ids=["committed", "executed"])
def test_owners_add_the_same_bits_twice(which):
    text = _printed(which("04_kernels"))
    assert "owner, twice: same bits True" in text
    assert re.search(r"atomic, twice: same bits (True|False)\n", text)  # a GPU's need not agree


def test_notebook_04_repeats_the_recorded_ladder():
    ladder = json.loads((results_dir() / "kernel_ladder_h200.json").read_text())
    forward = [rung for rung in ladder["rungs"] if rung["way"] == "forward"]
    solution = next(c.source for c in _read("04_kernels").cells if c.id == "kernels-32")
    for rung in forward[2:]:
        row = next(x for x in solution.splitlines() if x.startswith(f"| {rung['name']} |"))
        assert row.endswith(f"| {rung['tflops']:.0f} |")


def test_every_unanswered_exercise_has_the_dots_that_its_message_names(committed):
    exercises = [c for c in committed.cells if c.cell_type == "code" and "\ncheck(" in c.source]
    assert exercises
    for cell in exercises:
        assert ": ..." in cell.source
        assert cell.outputs[0].text == f"{NOT_YET}\n"


def test_notebooks_link_one_another():
    linked = {name: "".join(c.source for c in _read(name).cells) for name in NAMES}
    assert "(04_kernels.ipynb)" in linked["00_start_here"]
    assert "(04_kernels.ipynb)" in linked["02_chunk_recurrence"]
    for name, text in linked.items():
        for target in re.findall(r"\]\(([^)#:]+\.ipynb)\)", text):
            assert (FOLDER / target).is_file(), f"{name} links {target}"


def test_every_notebook_is_tested():
    assert sorted(p.stem for p in FOLDER.glob("*.ipynb")) == NAMES


def test_committed_notebooks_were_executed_in_order(committed):
    code = [c for c in committed.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    nbformat.validate(committed)


def test_committed_outputs_are_png_and_text_only(committed):
    for output in _outputs(committed):
        assert output.output_type != "error"
        if output.output_type == "stream":
            assert output.name == "stdout"
        else:
            assert set(output.data) <= {"image/png", "text/plain"}
            assert "widget" not in str(output.data.get("text/plain", ""))
    assert "widgets" not in committed.metadata
    assert all("execution" not in c.metadata for c in committed.cells)


def test_committed_pictures_are_real_and_described(committed):
    pictures = _pictures(committed)
    assert len(pictures) >= 3
    for output in pictures:
        image = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGBA")
        assert min(image.size) > 200
        assert 0.01 < (np.asarray(image)[..., 3] > 0).mean() < 0.9
        assert len(output.data["text/plain"]) > 40


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebooks_are_small(name):
    assert (FOLDER / f"{name}.ipynb").stat().st_size < LIMIT


def test_outputs_name_no_place_on_a_machine(committed):
    text = "".join(str(o) for o in _outputs(committed) if "image/png" not in o.get("data", {}))
    assert not re.search(r"/(home|root|tmp|usr|work|Users)/|[A-Z]:\\|localhost|site-packages", text)


def test_cells_use_public_names_only(committed):
    for cell in committed.cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(cell.source)):
            names = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom):
                names = [*node.module.split("."), *(a.name for a in node.names)]
            elif isinstance(node, ast.Import):
                names = [part for a in node.names for part in a.name.split(".")]
            private = [n for n in names if n.startswith("_") and not n.endswith("__")]
            assert not private, f"{private} in: {cell.source}"


def test_cells_are_short_enough_to_read(committed):
    lengths = [len(c.source.splitlines()) for c in committed.cells if c.cell_type == "code"]
    assert np.median(lengths) <= 8
    assert max(lengths) <= 20


# A number with a unit of measurement, or one with a decimal point: what only a measurement knows.
_MEASURED = re.compile(
    r"(?<![\w.])(\d[\d,]*\.\d+|\d[\d,.]*(?= ?(?:[KMGT]i?B\b|bytes\b|seconds?\b|ms\b|%|times\b)))"
)


def test_prose_repeats_measured_numbers_only_from_the_cells_above_it(committed):
    seen = ""
    for cell in committed.cells:
        if cell.cell_type == "code":
            seen += cell.source + "".join(str(o.get("text", "")) for o in cell.outputs)
            continue
        prose = re.sub(r"```.*?```|`[^`]*`", "", cell.source, flags=re.DOTALL)
        for number in _MEASURED.findall(prose):
            assert number in seen or number in _DEFINED, f"{number} is typed in: {cell.source}"


_DEFINED = {"140", "227"}  # the card of the opening question in GB, a multiprocessor in KiB


def test_the_solutions_in_the_notebooks_pass_their_checks(committed):
    from oomb_widgets import judge

    scope: dict = {}
    exec(_IMPORTS, scope)
    exercises = [
        re.search(r'check\("(\w+)", (\w+)\)', c.source)
        for c in committed.cells
        if c.cell_type == "code" and "check(" in c.source
    ]
    folded = "\n".join(c.source for c in committed.cells if "<details>" in c.source)
    for code in re.findall(r"```python\n(.*?)```", folded, flags=re.DOTALL):
        exec(code, scope)
    assert exercises
    for found in filter(None, exercises):
        verdict = judge(found[1], scope[found[2]])
        assert verdict.passed, f"{found[1]}: {verdict.message}"


def test_the_solution_names_the_context_at_which_the_card_is_full():
    notebook = _read("00_start_here")
    cells = {c.id: c for c in notebook.cells}
    scope: dict = {}
    for name in ("start-05", "start-06", "start-08"):
        exec(cells[name].source, scope)
    model = cells["start-12"].source
    exec(re.search(r"^seven_b = .*", model, re.MULTILINE)[0], scope)
    exec(re.search(r"^per_token = .*", model, re.MULTILINE)[0], scope)
    printed = re.search(r"parameters: ([\d.]+) GB", cells["start-13"].outputs[0].text)
    scope |= {"card": 140e9, "fixed": float(printed[1]) * 1e9}
    solution = cells["start-41"].source
    exec(re.search(r"```python\n(.*?)```", solution, re.DOTALL)[1], scope)
    formula, said = re.search(r"`(\(card [^`]*)`: about ([\d,]+) tokens", solution).groups()
    assert eval(formula, scope) == pytest.approx(float(said.replace(",", "")), abs=1000)


_IMPORTS = """
import torch
from torch.nn.functional import cross_entropy, pad
"""


# --- the program that `make notebooks` runs ----------------------------------------------------


def _widget_output():
    data = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "Widget()"}
    return new_output("display_data", data=data)


def test_strip_leaves_png_and_text():
    cell = new_code_cell("1", metadata={"execution": {"iopub.status.busy": "now"}})
    cell.outputs = [
        new_output("stream", name="stderr", text="a warning"),
        new_output("stream", name="stdout", text="kept"),
        _widget_output(),
        new_output("execute_result", data={"text/html": "<b>", "text/plain": "kept too"}),
    ]
    notebook = new_notebook(cells=[cell], metadata={"widgets": {"state": {}}})
    strip(notebook)
    assert [o.get("text") or o.data for o in cell.outputs] == ["kept", {"text/plain": "kept too"}]
    assert "widgets" not in notebook.metadata
    assert not cell.metadata


def test_the_program_executes_in_place(tmp_path, capsys):
    path = tmp_path / "sum.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("print(1 + 1)", id="sum")]), path)
    assert main([str(tmp_path)]) == 0
    assert nbformat.read(path, as_version=4).cells[0].outputs[0].text == "2\n"
    assert "sum.ipynb" in capsys.readouterr().out


def test_the_program_names_what_is_missing(tmp_path, capsys):
    assert main([str(tmp_path / "none.ipynb")]) == 2
    assert "no such notebook" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "no .ipynb file" in capsys.readouterr().err
