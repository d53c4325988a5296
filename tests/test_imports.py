"""What the code's text says, nothing executed: imports run one way and in no circle, and no function outgrows a screen."""

from __future__ import annotations

import ast
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "toolkit",
    "hydra_plugins",
    "data_gen",
    "analysis",
    "benchmarks",
    "tests",
)  # each may import itself and those before it
# Inside the toolkit, lowest first: each may import those of lower layers, and none of its own layer but itself.
LAYERS = (
    ("errors",),
    ("types",),
    ("files", "metrics"),
    ("config",),
    ("drafts",),  # what a kind is, and the kind of a folder
    ("engine", "runs", "sampling"),
    ("models",),
    ("costs", "drafts.causes", "drafts.speculators", "drafts.target_states", "grammar"),
    ("search", "stopping", "verification"),
    ("acceptance", "pair"),
    ("decoding",),
    ("trace",),
    ("training",),
    ("api", "decode", "distillation", "sync", "train"),
    ("drafts.block", "drafts.eagle3", "drafts.separate"),  # kinds; others name them as texts
    ("distill", "integrations", "testing", "train_heads"),
)
LONGEST = 80  # lines of a function
Graph = dict[str, set[str]]


@pytest.fixture(scope="module", autouse=True)
def _trees_are_dropped():
    """A million objects that stay would be looked at in every collection of garbage."""
    yield
    modules.cache_clear()


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the project by its name, parsed."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return {name: ast.parse(path.read_text()) for name, path in zip(names, paths, strict=True)}


@cache
def imports() -> Graph:
    """The project's modules that each module imports: at its top, inside functions, for types alone."""
    return {name: imported(tree, modules()) - {name} for name, tree in modules().items()}


def imported(tree: ast.AST, known: dict[str, ast.Module]) -> set[str]:
    """Of the known modules, those that a parsed text imports. `from package import name` is the module of that name, if any."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in known else node.module for name in inner}
    return names & set(known)


def circles(graph: Graph) -> set[tuple[str, ...]]:
    """Sets of modules that can all be reached from each other."""
    reach = {name: reachable(name, graph) for name in graph}
    rings = {name: tuple(sorted(other for other in reached if name in reach[other])) for name, reached in reach.items()}
    return {ring for ring in rings.values() if ring}


def reachable(name: str, graph: Graph) -> set[str]:
    """Modules that a module imports, or that these import, and so on."""
    reached: set[str] = set()
    ahead = [name]
    while ahead:
        fresh = graph[ahead.pop()] - reached
        reached |= fresh
        ahead += fresh
    return reached


def part(name: str) -> str:
    """The module or subpackage of the toolkit that a module belongs to, as LAYERS names it; "" is the package itself."""
    parts = [*name.split("."), ""][1:]
    inner = ".".join(parts[:2])
    return inner if any(inner in layer for layer in LAYERS) else parts[0]


def test_the_reading_of_imports():
    known = dict.fromkeys(("a", "a.b", "a.c", "d"))
    text = "from a import b, other\ndef f():\n    import d.x, d\nif 0:\n    from a.c import thing\nimport os"
    assert imported(ast.parse(text), known) == {"a", "a.b", "a.c", "d"}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {("b", "c")}


def test_no_module_is_imported_by_what_it_imports():
    assert circles(imports()) == set()


@pytest.mark.parametrize(("lower", "higher"), pairwise(PACKAGES))
def test_packages_import_those_before_them(lower, higher):
    above = PACKAGES[PACKAGES.index(higher) :]
    arrows = {(a, b) for a, imported in imports().items() for b in imported if a.split(".")[0] == lower}
    assert {(a, b) for a, b in arrows if b.split(".")[0] in above} == set()


def test_the_toolkits_layers():
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    level[""] = len(LAYERS)
    ours = {name: imported for name, imported in imports().items() if name.split(".")[0] == "toolkit"}
    assert {part(name) for name in ours} - set(level) == set(), "not in LAYERS"
    arrows = {(part(a), part(b)) for a, imported in ours.items() for b in imported if part(a) != part(b)}
    assert {(a, b) for a, b in arrows if level[a] <= level[b]} == set()


def test_what_analysis_shares_imports_no_command():
    """Commands are the modules right in the package; what they share lies in folders, but for their keys."""
    commands = {name for name in modules() if name.startswith("analysis.") and name.count(".") == 1}
    folders = {name for name in commands if any(other.startswith(f"{name}.") for other in modules())}
    shared = {a: imported for a, imported in imports().items() if a.startswith(tuple(f"{name}." for name in folders))}
    assert {
        (a, b) for a, imported in shared.items() for b in imported if b in commands - folders - {"analysis.keys"}
    } == set()


def test_folders_of_analysis_import_one_way():
    folders = {name: name.split(".")[1] for name in modules() if name.startswith("analysis.") and name.count(".") > 1}
    arrows = {(a, b) for name, a in folders.items() for other in imports()[name] if (b := folders.get(other, a)) != a}
    assert len(arrows) > 5
    assert circles({folder: {b for a, b in arrows if a == folder} for folder in folders.values()}) == set()


def test_no_function_is_longer_than_a_screen():
    functions = [
        (module, node)
        for module, tree in modules().items()
        if not module.startswith("tests")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {(module, node.name): (node.end_lineno or 0) - node.lineno + 1 for module, node in functions}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_the_loop_has_typed_seams():
    """Nothing that crosses the decoding loop is of type Any, and nothing is read from an object by a field's name."""
    loop = {name: tree for name, tree in modules().items() if name.startswith("toolkit.decoding")}
    assert len(loop) > 10
    names = {
        (module, node.id) for module, tree in loop.items() for node in ast.walk(tree) if isinstance(node, ast.Name)
    }
    assert {module for module, name in names if name in ("Any", "getattr", "setattr")} == set()
