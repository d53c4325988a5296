"""Runs the code cells of a notebook, and prints the last value of each: python examples/run_notebook.py FILE.ipynb"""

import ast
import json
import sys
from pathlib import Path


def execute(path):
    """Run the cells in one namespace and return it."""
    namespace = {}
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), str(path))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(path), "exec"), namespace)
        if last is not None:
            print(eval(compile(ast.Expression(last.value), str(path), "eval"), namespace))
    return namespace


if __name__ == "__main__":
    execute(sys.argv[1])
