"""Who may import whom: the directions that keep the folders apart.

    boinc_project  <-  work_generator, apps, validator, assimilator      (apps: boinc_project.contract only)
    contract       ->  numpy, safetensors, zstandard, the standard library
    cli, calibration, simulator  ->  everything: they are composition roots

Read from the source with `ast`; nothing is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STATIONS = ("work_generator", "apps", "validator", "assimilator")
PACKAGES = ("boinc_project", *STATIONS)
HEAVY = ("torch", "sqlalchemy", "pyopencl")  # not on volunteers' computers, or only in one backend
MODULES_ABOUT_THEM = {
    **{f"apps/gradient/backends/{name}.py": ("torch",) for name in ("torch_backend", "torch_device", "torch_checks")},
    **{
        f"apps/gradient/opencl/{name}.py": ("pyopencl",)
        for name in ("device", "programs", "runtime", "opencl_backend", "peak", "tune")
    },
}
CONTRACT = "boinc_project/contract/"
COMPOSITION_ROOTS = ("boinc_project/cli/", "boinc_project/calibration/", "boinc_project/simulator/")
CONTRACT_LIBRARIES = {"numpy", "safetensors", "zstandard"}


@dataclass(frozen=True)
class Import:
    """One imported module, where, and whether it is imported when the file is."""

    name: str
    line: int
    at_top: bool

    @property
    def root(self) -> str:
        return self.name.partition(".")[0]


def files(*folders: str) -> list[str]:
    """Python files under these folders, relative to the repository."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def imports(path: str) -> list[Import]:
    """Everything that a file imports; `from a import b` counts as a.b, so that submodules are seen."""
    return list(_imports(ast.parse((ROOT / path).read_text(encoding="utf-8")), Path(path).parent, True))


def _imports(node: ast.AST, package: Path, at_top: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, at_top) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package.parts[: len(package.parts) - node.level + 1] if node.level else ()
        module = ".".join((*base, *([node.module] if node.module else [])))
        yield from (Import(f"{module}.{alias.name}", node.lineno, at_top) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue  # for the type checker only
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(child, package, at_top and not inside)


def offences(paths: list[str], forbidden: object) -> list[str]:
    """`file:line imports name` for every import that `forbidden(path, import)` objects to."""
    assert callable(forbidden)
    return [
        f"{path}:{each.line} imports {each.name}" for path in paths for each in imports(path) if forbidden(path, each)
    ]


def test_the_four_stations_never_import_one_another() -> None:
    def forbidden(path: str, each: Import) -> bool:
        return each.root in STATIONS and each.root != path.partition("/")[0]

    assert offences(files(*STATIONS), forbidden) == []


def test_the_application_knows_nothing_of_the_project_but_the_contract() -> None:
    def forbidden(path: str, each: Import) -> bool:
        return each.root == "boinc_project" and not f"{each.name}.".startswith("boinc_project.contract.")

    assert offences(files("apps"), forbidden) == []


def test_only_the_composition_roots_import_the_stations() -> None:
    paths = [path for path in files("boinc_project") if not path.startswith(COMPOSITION_ROOTS)]
    assert offences(paths, lambda path, each: each.root in STATIONS) == []


def test_nothing_imports_the_command_line_and_only_it_the_simulator() -> None:
    paths = [path for path in files(*PACKAGES) if not path.startswith("boinc_project/cli/")]
    assert offences(paths, lambda path, each: f"{each.name}.".startswith("boinc_project.cli.")) == []
    paths = [path for path in paths if not path.startswith("boinc_project/simulator/")]
    assert offences(paths, lambda path, each: f"{each.name}.".startswith("boinc_project.simulator.")) == []


def test_packages_do_not_import_tests_or_examples() -> None:
    assert offences(files(*PACKAGES), lambda path, each: each.root in ("tests", "examples")) == []


def test_volunteers_code_loads_no_heavy_library_when_imported() -> None:
    def forbidden(path: str, each: Import) -> bool:
        return each.at_top and each.root in HEAVY and each.root not in MODULES_ABOUT_THEM.get(path, ())

    assert offences(files("apps", CONTRACT), forbidden) == []


def test_the_contract_needs_numpy_safetensors_and_zstandard_only() -> None:
    allowed = CONTRACT_LIBRARIES | set(sys.stdlib_module_names)

    def forbidden(path: str, each: Import) -> bool:
        return each.root not in allowed and not f"{each.name}.".startswith("boinc_project.contract.")

    assert offences(files(CONTRACT), forbidden) == []


@pytest.mark.parametrize("folder", PACKAGES)
def test_every_folder_is_looked_at(folder: str) -> None:
    assert files(folder)


def test_imports_are_found_in_every_form() -> None:
    source = "import a.b\nfrom . import c\nfrom .d import e\nfrom f import g as h\ndef i():\n    import j\n"
    found = list(_imports(ast.parse(source), Path("p/q"), True))
    assert [(each.name, each.at_top) for each in found] == [
        ("a.b", True),
        ("p.q.c", True),
        ("p.q.d.e", True),
        ("f.g", True),
        ("j", False),
    ]
