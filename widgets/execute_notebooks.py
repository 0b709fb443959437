"""Run notebooks from top to bottom and store what every viewer can show: PNG and text.

python -m oomb_widgets.execute_notebooks notebooks
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

KEPT_TYPES = ("image/png", "text/plain")


def execute(path: Path, timeout: int = 600) -> NotebookNode:
    """Run a notebook in its own folder; the file stays as it is.

    Args:
        path: A .ipynb file.
        timeout: Seconds that one cell may take.

    Returns:
        The notebook with new, clean outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: When a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    return strip(notebook)


def strip(notebook: NotebookNode) -> NotebookNode:
    """Remove in place what does not belong into a repository, and return the notebook.

    Widget state shows "model not found" without its kernel, stderr holds warnings that name
    files of this machine, and timings change with every run.
    """
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict(
            {k: v for k, v in cell.metadata.items() if k in ("tags", "collapsed")}
        )
        if cell.cell_type == "code":
            cell.outputs = list(_kept(cell.outputs))
    return notebook


def _kept(outputs: Sequence[NotebookNode]) -> Iterator[NotebookNode]:
    for output in outputs:
        if output.output_type == "stream":
            if output.name == "stdout":
                yield output
        elif output.output_type in ("display_data", "execute_result"):
            is_widget = any("widget-view" in mime for mime in output.data)
            output.data = {k: v for k, v in output.data.items() if k in KEPT_TYPES}
            if output.data and not is_widget:
                yield output
        else:
            yield output


def _find(paths: Sequence[Path]) -> list[Path]:
    found = [q for p in paths for q in (sorted(p.glob("*.ipynb")) if p.is_dir() else [p])]
    for path in found:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such notebook")
    if not found:
        raise FileNotFoundError(f"no .ipynb file in {', '.join(map(str, paths))}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the notebooks named on the command line in place; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run notebooks and store clean outputs.")
    parser.add_argument("paths", nargs="+", type=Path, help="notebooks, or folders of notebooks")
    try:
        notebooks = _find(parser.parse_args(arguments).paths)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    for path in notebooks:
        start = time.perf_counter()
        nbformat.write(execute(path), path)
        kib = path.stat().st_size / 1024
        print(f"{path}: {time.perf_counter() - start:.1f} s, {kib:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
