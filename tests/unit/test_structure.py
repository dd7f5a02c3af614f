"""How the tree is built: files on one level, shares of the packages, depth of inheritance.

Circles of imports are the import contracts' (``pyproject.toml``, ``acyclic_siblings``).
"""

import ast
from collections import Counter
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
FILES = sorted((SRC / "refcache").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

MODULES = 14
"""Of a package, on one level: what one sees at a glance."""
SHARE = 0.32
"""The largest package's part of all lines."""
DEPTH = 3
"""Classes of our own on a path of inheritance."""
NAMED_BY_SGLANG = {"RadixTree", "RadixCache", "HiRadixCache"}
"""Below SGLang's own class names there may be one more."""


def test_few_modules_stand_on_one_level() -> None:
    modules = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert {str(d): n for d, n in modules.items() if n > MODULES} == {}


def test_no_package_is_a_third_of_the_house() -> None:
    lines: Counter[str] = Counter()
    for path in FILES:
        part = path.relative_to(SRC / "refcache").parts[0]
        lines[part] += len(path.read_text(encoding="utf-8").splitlines())
    assert {k: n for k, n in lines.items() if n > SHARE * lines.total()} == {}


def bases() -> dict[str, list[str]]:
    """Each class of ours with the names of its bases."""
    found: dict[str, list[str]] = {}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = [
                    getattr(b.value if isinstance(b, ast.Subscript) else b, "id", "")
                    for b in node.bases
                ]
                found.setdefault(node.name, names)
    return found


def path_to(name: str, ours: dict[str, list[str]]) -> list[str]:
    """The longest path of our own classes that ends in ``name``."""
    above = [path_to(base, ours) for base in ours.get(name, []) if base in ours and base != name]
    return [*max(above, key=len, default=[]), name]


def test_inheritance_is_three_classes_deep_at_most() -> None:
    ours = bases()
    deep = [p for p in (path_to(n, ours) for n in ours) if len(p) > DEPTH]
    assert [p for p in deep if len(p) > DEPTH + 1 or not NAMED_BY_SGLANG & {*p}] == []


def settings_made(tree: ast.Module) -> list[int]:
    """Lines outside of functions and the main guard that set ``os.environ[...]``, read ``argv``."""
    found: list[int] = []
    for line in tree.body:
        if not isinstance(line, ast.FunctionDef | ast.ClassDef | ast.If):
            found += [
                node.lineno
                for node in ast.walk(line)
                if (
                    (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
                    and ast.unparse(node.value) == "os.environ"
                )
                or ast.unparse(node) == "sys.argv"
            ]
    return found


def test_a_helper_can_be_imported_beside_other_tests() -> None:
    """They are collected for doctests; a variable set then would stay for every test after."""
    helpers = sorted((SRC.parent / "tests" / "helpers").glob("*.py"))
    assert helpers
    made = {path.name: settings_made(ast.parse(path.read_text("utf-8"))) for path in helpers}
    assert {name: lines for name, lines in made.items() if lines} == {}
