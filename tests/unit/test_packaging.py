"""What is shipped: every package, nothing twice, no import that a plain install lacks."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_DIR = PROJECT["tool"]["setuptools"]["package-dir"]
FLOORS_0_TO_4 = (
    "engine",
    "tree",
    "controller",
    "allocator",
    "pool",
    "runtime",
    "backend",
    "errors",
    "types",
    "keys",
    "events",
    "tags",
    "reference",
)


def modules_of(package: str) -> dict[str, Path]:
    """Path in the wheel -> source file, of every module below an import package."""
    folder = ROOT / PACKAGE_DIR[package]
    return {
        f"{package}/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*.py")
    }


def run_python(code: str, *path: str) -> str:
    """Output of ``code`` in a fresh interpreter that sees ``path`` and what is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_list_is_the_tree() -> None:
    folders = {
        str(Path(module).parent).replace("/", ".")
        for package in PACKAGE_DIR
        for module in modules_of(package)
    }
    assert sorted(folders) == sorted(PROJECT["tool"]["setuptools"]["packages"])


def test_wheel_contents(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    done = subprocess.run([*build, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    expected = {name for package in PACKAGE_DIR for name in modules_of(package)}
    expected |= {
        f"{package}/{path.relative_to(ROOT / PACKAGE_DIR[package]).as_posix()}"
        for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (ROOT / PACKAGE_DIR[package]).glob(pattern)
    }
    assert {f"{package}/py.typed" for package in PACKAGE_DIR} <= expected
    assert expected <= shipped
    extra = {name for name in shipped - expected if ".dist-info/" not in name}
    assert not extra
    assert any(name.endswith("licenses/LICENSE") for name in shipped)
    where = run_python("import refcache; print(refcache.__file__)", str(tmp_path / "site"))
    assert Path(where) == tmp_path / "site" / "refcache" / "__init__.py"


def test_imports_without_triton() -> None:
    code = f"""
import importlib, sys
sys.modules["triton"] = None
import refcache
for floor in {FLOORS_0_TO_4!r}:
    importlib.import_module("refcache." + floor)
print("ok")
"""
    assert run_python(code, str(ROOT / "src"), str(ROOT / "aliases")) == "ok"


def test_the_main_job_needs_neither_numpy_nor_triton() -> None:
    """Torch comes without numpy, and then ``Tensor.numpy`` raises."""
    code = """
import sys, warnings
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(name)
sys.modules["triton"] = None
sys.meta_path.insert(0, Missing())
warnings.simplefilter("ignore")  # torch says that numpy is not there
from refcache.replay.loop import replay
from refcache.replay.config import ReplayConfig
from refcache.replay.workload import synthesize
from refcache.testing import run_suite
from refcache.oracle import resolve
config = ReplayConfig(device_tokens=16384, host_ratio=2, check="every")
result = replay(synthesize(8, seed=0), config)
verdicts = {
    suite: run_suite(suite, resolve("refcache"), max_examples=3).verdict
    for suite in ("allocator.state", "tree.state", "hicache.state", "hicache.streams")
}
print(result.requests, *set(verdicts.values()))
"""
    assert run_python(code, str(ROOT / "src"), str(ROOT / "aliases")) == "8 ok"


def test_entry_points_exist() -> None:
    groups = [PROJECT["project"]["scripts"], *PROJECT["project"].get("entry-points", {}).values()]
    for spec in (spec for group in groups for spec in group.values()):
        module, _, attribute = spec.partition(":")
        loaded = importlib.import_module(module)
        assert not attribute or callable(getattr(loaded, attribute))


def test_plain_ops_is_not_importable() -> None:
    code = "import importlib.util as u; print(u.find_spec('ops'), u.find_spec('refcache') is None)"
    if run_python(code).endswith("True"):
        pytest.skip("refcache is not installed here; `make test` installs it")
    assert run_python(code) == "None False"


@pytest.mark.parametrize("floor", FLOORS_0_TO_4)
def test_the_reference_is_pytorch_and_the_standard_library(floor: str) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "refcache"}
    for name, path in modules_of("refcache").items():
        if not name.startswith((f"refcache/{floor}/", f"refcache/{floor}.py")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported = {node.module or ""}
            else:
                continue
            assert {module.partition(".")[0] for module in imported} <= allowed, (
                f"{name}: {imported}"
            )


def test_constraints_pin_what_the_project_asks_for() -> None:
    pinned = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"].values()
    asked = [*PROJECT["project"]["dependencies"], *(need for extra in extras for need in extra)]
    names = {need.partition(">")[0].partition("[")[0].lower() for need in asked} - {"refcache"}
    assert {name.replace("_", "-") for name in names} <= {p.replace("_", "-") for p in pinned}
