"""The page of the ops says what holds, and its example runs."""

import importlib.util
import runpy
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ops_table", ROOT / "scripts" / "ops_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_what_running_it_gives(kernel_ops: SimpleNamespace) -> None:
    made = script()
    written = made.PAGE.read_text()
    assert "NO" not in written.partition(made.BEGIN)[2].partition(made.END)[0]
    assert made.page(written, made.table()) == written, "run scripts/ops_table.py"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch.compiler.reset()
    runpy.run_path(str(ROOT / "examples" / "compiled_backup.py"), run_name="__main__")
    assert "backed up slots [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]" in capsys.readouterr().out
    torch.compiler.reset()
