"""Execute docs/notebook.ipynb without Jupyter.

`python -m tests.docs.notebook` writes its outputs, in a few minutes. A cell consists either of commands (`!trainshed …`) or of
Python, of whose last expression the value is shown.
"""

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "docs/notebook.ipynb"
SHOWN = {"image/svg+xml": "_repr_svg_", "text/html": "_repr_html_"}


def execute(notebook: dict[str, Any], run: Callable[[str], str]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Execute the cells in the working folder.

    Args:
        run: runs a command and returns what it printed.

    Yields:
        Each cell with its printed text and the value of its last expression.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        source, printed, value = "".join(cell["source"]), io.StringIO(), None
        if cell["cell_type"] != "code":
            continue
        if source.startswith("!"):
            for line in source.splitlines():
                printed.write(run(line.removeprefix("!")))
        else:
            *body, last = ast.parse(source).body
            if not isinstance(last, ast.Expr):
                body.append(last)
            with redirect_stdout(printed), redirect_stderr(io.StringIO()):
                exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
                if isinstance(last, ast.Expr):
                    value = eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)
        yield cell, printed.getvalue(), value


def outputs(printed: str, value: Any) -> list[dict[str, Any]]:
    """A cell's outputs in the notebook's format."""
    found: list[dict[str, Any]] = []
    if printed:
        found.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data = {kind: getattr(value, name)() for kind, name in SHOWN.items() if hasattr(value, name)}
        data = data if "image/svg+xml" in data else data | {"text/plain": repr(value)}
        data = {kind: text.splitlines(keepends=True) for kind, text in data.items()}
        found.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return found


def main() -> None:
    """Execute the notebook in a new folder, and write its outputs into it."""

    def run(command: str) -> str:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "COLUMNS": "100"}
        ended = subprocess.run(
            ["bash", "-c", command], check=True, capture_output=True, text=True, env=environment
        )
        return ended.stdout

    notebook = json.loads(NOTEBOOK.read_text())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number, (cell, printed, value) in enumerate(execute(notebook, run), start=1):
            cell["outputs"], cell["execution_count"] = outputs(printed, value), number
            for output in cell["outputs"]:
                if "execution_count" in output:
                    output["execution_count"] = number
            print(printed)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
