"""Packages whose names are imported at first use (PEP 562).

Such a package lists its names once, below ``if TYPE_CHECKING:``, as if it imported them there::

    if TYPE_CHECKING:
        from refcache.oracle.tree_driver import TreeDriver

    __getattr__ = lazy_names(__name__)

Then ``from refcache.oracle import TreeDriver`` works as always, and importing one module of the
package does not import all the others, nor PyTorch.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose module is being executed; see the module's text."""
    module = sys.modules[package]
    homes = {
        alias.name: statement.module
        for block in ast.parse(inspect.getsource(module)).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, found)
        return found

    return get
