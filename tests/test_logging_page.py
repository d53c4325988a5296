"""docs/logging.md names every key that the code logs to Weights & Biases, and the files that log them."""

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
FUNCTIONS = {"log_summary", "log_table", "log_image", "log_scatter", "log_lines", "log_metrics", "log_dict"}
CURVE = re.compile(r"(train|val|perf|replay|best|parameters)/\w+$")


def documented() -> list[tuple[str, list[str]]]:
    """(key with * for what stands in capitals, files) of every row of the page's tables that have a column "key"."""
    keys, column = [], None
    for line in PAGE.split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            column = None
        elif "key" in cells:
            column = cells.index("key")
        elif column is not None:
            files = re.findall(r"`([\w/]+(?:\.py|/))`", cells[-1])
            keys += [(re.sub(r"[A-Z]{2,}", "*", key), files) for key in re.findall(r"`([^`]+)`", cells[column])]
    return keys


def pattern(node: ast.expr) -> str | None:
    """A key as it stands in the code, with * for what is filled in; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return None


def logged() -> set[tuple[str, str]]:
    """(file, key) of every call of a logging function, and of every curve's name."""
    calls = set()
    for package in ("toolkit", "analysis"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            text = path.read_text(encoding="utf-8")
            curves = "log_metrics(" in text or "log_dict(" in text
            for node in ast.walk(ast.parse(text)):
                keys: list[ast.expr | None] = []
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in FUNCTIONS:
                    keys += node.args[:2]
                    keys += [key for argument in node.args if isinstance(argument, ast.Dict) for key in argument.keys]
                texts = [pattern(key) for key in keys if key is not None]
                if curves and isinstance(node, ast.Constant) and CURVE.match(str(node.value)):
                    texts.append(node.value)
                calls |= {(name, text) for text in texts if text is not None}
    return calls


LOGGED = sorted(logged())


def test_the_page_has_keys_and_the_code_logs_some():
    assert len(documented()) > 30 < len(LOGGED)


@pytest.mark.parametrize(("path", "key"), LOGGED, ids=[f"{path}:{key}" for path, key in LOGGED])
def test_every_logged_key_is_on_the_page(path, key):
    assert any(fnmatchcase(key, known) for known, _ in documented()), f"{path} logs {key}, docs/logging.md lacks it"


@pytest.mark.parametrize(("key", "files"), documented(), ids=[key for key, _ in documented()])
def test_every_key_of_the_page_is_in_its_file(key, files):
    paths = [file for path in files for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).glob("*.py"))]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    missing = [part for part in re.split(r"[/*]", key) if len(part) > 2 and part.strip("-_") not in text]
    assert not missing, f"{key}: {', '.join(files)} do not have {missing}"
