"""What a package's classes and functions offer a caller, read from its source: nothing is imported.

:class:`Package` finds a public name in a module and follows its base classes through imports, in
the package only. A :class:`Shape` has the arguments of a call in order, with their defaults, and
for a class its public methods and attributes: what ``__init__`` and the methods it calls set, what
the class body says, and its properties.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FIELDS_OF = ("NamedTuple", "Struct", "TypedDict")  # classes whose body lists their arguments
OPERATORS = ("__len__", "__iter__", "__getitem__", "__lt__", "__eq__", "__call__", "__contains__")


@dataclass(frozen=True)
class Argument:
    """``default`` is its source text; None: required. ``kind``: "" positional, "*" by name only,
    "**" whatever else is given."""

    name: str
    default: str | None = None
    kind: str = ""


@dataclass
class Shape:
    """See the module docstring; ``methods`` and ``attributes`` are empty for a function."""

    arguments: list[Argument] = field(default_factory=list)
    methods: dict[str, list[Argument]] = field(default_factory=dict)
    attributes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Shape":
        methods = {name: [Argument(**a) for a in args] for name, args in told["methods"].items()}
        return cls([Argument(**a) for a in told["arguments"]], methods, told["attributes"])


Function = ast.FunctionDef | ast.AsyncFunctionDef


class Package:
    """The package ``name`` in ``folder`` (which contains the folder ``name``)."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.tree = cache(self.tree)  # type: ignore[method-assign]

    def modules(self) -> Iterator[str]:
        """Every module, dotted."""
        for file in sorted((self.folder / self.name).rglob("*.py")):
            parts = file.relative_to(self.folder).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def source(self, module: str) -> str:
        """The text of a module; empty when there is none."""
        path = self.folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text(encoding="utf-8-sig")
        return ""

    def tree(self, module: str) -> ast.Module:
        """The source of a module, parsed."""
        return ast.parse(self.source(module))

    def public(self, module: str) -> list[str]:
        """The public classes and functions that a module defines."""
        return re.findall(
            r"^(?:class|def|async def) ([a-zA-Z]\w*)", self.source(module), re.MULTILINE
        )

    def shape(self, module: str, name: str) -> Shape:
        """What ``name`` of ``module`` offers; KeyError when there is no such class or function."""
        found = self._find(module, name)
        if found is None:
            raise KeyError(f"{module} has no {name}")
        if isinstance(found[1], ast.ClassDef):
            return self._class_shape(self._lineage(*found))
        return Shape(_arguments(found[1], bound=False))

    def _find(self, module: str, name: str) -> tuple[str, ast.ClassDef | Function] | None:
        for node in ast.walk(self.tree(module)):
            if isinstance(node, (ast.ClassDef, *Function.__args__)) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(self.name):
                for alias in node.names:
                    if (alias.asname or alias.name) == name and node.module != module:
                        return self._find(node.module or "", alias.name)
        return None

    def _lineage(self, module: str, node: ast.ClassDef) -> list[ast.ClassDef]:
        """The class and its bases of this package, nearest first."""
        line = [node]
        for base in node.bases:
            found = self._find(module, ast.unparse(base).partition("[")[0])
            if found is not None and isinstance(found[1], ast.ClassDef):
                line += [c for c in self._lineage(found[0], found[1]) if c not in line]
        return line

    def _class_shape(self, line: list[ast.ClassDef]) -> Shape:
        methods: dict[str, Function] = {}
        every: dict[str, list[Function]] = {}
        for cls in reversed(line):
            for node in cls.body:
                if isinstance(node, Function):
                    methods[node.name] = node
                    every.setdefault(node.name, []).append(node)
        attributes = {name for cls in line for name in _body_names(cls)}
        for name in ("__init__", "__post_init__"):
            for node in every.get(name, []):
                attributes |= _set_in(node, every, {name})
        shape = Shape()
        for name, method in methods.items():
            if name.startswith("_") and name not in OPERATORS:
                continue
            if _decorated(method, "property", "cached_property", "setter"):
                attributes.add(name)
            else:
                bound = not _decorated(method, "staticmethod")
                shape.methods[name] = _arguments(method, bound)
        if "__init__" in methods:
            shape.arguments = _arguments(methods["__init__"], bound=True)
        elif any(_has_fields(cls) for cls in line):
            shape.arguments = _fields(line)
        shape.methods = dict(sorted(shape.methods.items()))
        public = {name for name in attributes if not name.startswith("_")}
        shape.attributes = sorted(public - set(shape.methods))
        return shape


def _decorated(node: Any, *names: str) -> bool:
    found = [ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list]
    return any(text.rpartition(".")[2] in names for text in found)


def _arguments(node: Function, bound: bool) -> list[Argument]:
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    defaults += given.defaults
    pairs = [(a, d, "") for a, d in zip(positional, defaults, strict=True)][1 if bound else 0 :]
    pairs += [(a, d, "*") for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    found = [Argument(a.arg, d and ast.unparse(d), kind) for a, d, kind in pairs]
    return [*found, *([Argument(given.kwarg.arg, "{}", "**")] if given.kwarg else [])]


def _has_fields(cls: ast.ClassDef) -> bool:
    bases = [ast.unparse(base).rpartition(".")[2] for base in cls.bases]
    return _decorated(cls, "dataclass") or any(base in FIELDS_OF for base in bases)


def _fields(line: list[ast.ClassDef]) -> list[Argument]:
    """The fields of a class that has no ``__init__`` of its own, base classes first."""
    found: dict[str, Argument] = {}
    for cls in reversed(line):
        by_name = any("kw_only=True" in ast.unparse(d) for d in cls.decorator_list)
        for node in cls.body:
            if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
                continue
            name, text = ast.unparse(node.target), node.value and ast.unparse(node.value)
            by_name = by_name or ast.unparse(node.annotation) == "KW_ONLY"
            named = "kw_only=True" in (text or "") or by_name
            kind = "*" if named and "kw_only=False" not in (text or "") else ""
            if name == "_":
                continue
            found[name] = Argument(name, _default(node.value), kind)
    return list(found.values())


def _default(value: ast.expr | None) -> str | None:
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        given = {word.arg: word.value for word in value.keywords}
        if "default_factory" in given:
            return f"{ast.unparse(given['default_factory'])}()"
        value = given.get("default")
    return value and ast.unparse(value)


def _body_names(cls: ast.ClassDef) -> Iterator[str]:
    for node in cls.body:
        if isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))


def _set_in(node: ast.AST, methods: dict[str, list[Function]], seen: set[str]) -> set[str]:
    """Attributes of ``self`` that a method sets, and those it calls on ``self``."""
    found = set()
    for part in ast.walk(node):
        if not (isinstance(part, ast.Attribute) and ast.unparse(part.value) in ("self", "super()")):
            continue
        if isinstance(part.ctx, ast.Store):
            found.add(part.attr)
        elif part.attr in methods and part.attr not in seen:
            seen.add(part.attr)
            for method in methods[part.attr]:
                found |= _set_in(method, methods, seen)
    return found
