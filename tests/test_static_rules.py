"""Rules of the source that no other test would notice: old Python on volunteers' side, nothing executed
that came from outside, nothing of one machine."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("boinc_project", "apps", "work_generator", "validator", "assimilator")
VOLUNTEERS = ("apps", "boinc_project/contract")
PROJECT_SIDE = "apps/packaging/"  # under apps/, yet run on the project's computer

OLDEST_PYTHON = (3, 9)
# Modules and names that Python 3.9's standard library does not have.
NEWER_MODULES = {"tomllib"}
NEWER_NAMES = {
    "asyncio": {"TaskGroup", "Runner", "timeout"},
    "contextlib": {"chdir", "aclosing"},
    "dataclasses": {"KW_ONLY"},
    "datetime": {"UTC"},
    "enum": {"StrEnum", "verify", "member", "nonmember"},
    "hashlib": {"file_digest"},
    "inspect": {"get_annotations"},
    "itertools": {"pairwise", "batched"},
    "types": {"UnionType", "NoneType", "EllipsisType"},
    "typing": {"Self", "TypeAlias", "ParamSpec", "Concatenate", "TypeGuard", "Never", "assert_never", "override"},
}
NEWER_KEYWORDS = {"dataclass": {"slots", "kw_only", "match_args", "weakref_slot"}, "zip": {"strict"}}
NEWER_METHODS = {"bit_count", "add_note", "hardlink_to", "is_junction"}
NEWER_BUILTINS = {"aiter", "anext", "ExceptionGroup", "BaseExceptionGroup"}

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}
UNSAFE_CALLS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.package",
    "os.system",
    "yaml.load",
    "yaml.unsafe_load",
}

TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".cfg", ".cl", ".h", ".xml", ".json", ".yml", ".yaml", ""}
# Home directories and temporary places of one machine; index addresses belong to each user's own configuration.
MACHINE_PATH = re.compile(r"(?<![\w.$}{*])/(?:home|root|Users|work)/[a-z0-9_.-]{2,}")
REGISTRY_HOST = re.compile(
    r"(?:pypi\.org|pythonhosted\.org|anaconda\.(?:org|com)|registry\.npmjs|deb\.debian\.org|--index-url|--extra-index-url)"
)


def test_every_package_is_installed() -> None:
    """Tests run from the checkout would not notice one that is missing from what pip installs."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in sources(*PACKAGES)}
    renamed = {"apps.gradient.kernels"}  # the folder `kernels`
    assert found == set(declared) - renamed


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 0)}"


def called(node: ast.Call) -> str:
    """`torch.load` for torch.load(...); '' for a call of something that is no name."""
    names: list[str] = []
    function: ast.expr = node.func
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    return ".".join(reversed([*names, function.id])) if isinstance(function, ast.Name) else ""


def volunteers_sources() -> list[Path]:
    return [p for p in sources(*VOLUNTEERS) if not p.relative_to(ROOT).as_posix().startswith(PROJECT_SIDE)]


@pytest.mark.parametrize("path", sources(*VOLUNTEERS), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_volunteers_code_is_python_3_9(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    ast.parse(text, str(path), feature_version=OLDEST_PYTHON)  # `match` and other new syntax raise here
    tree = parsed(path)
    assert any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" and node.names[0].name == "annotations"
        for node in tree.body
    ) or not any(isinstance(node, ast.AnnAssign | ast.arg) for node in ast.walk(tree)), (
        f"{path.name} lacks `from __future__ import annotations`: its `X | Y` would be evaluated"
    )
    assert list(newer_names(path, tree)) == []


def newer_names(path: Path, tree: ast.Module) -> Iterator[str]:
    """What a file uses that came after Python 3.9."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"{place(path, node)} {a.name}" for a in node.names if a.name in NEWER_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module in NEWER_MODULES:
                yield f"{place(path, node)} {node.module}"
            newer = NEWER_NAMES.get(node.module, set())
            yield from (f"{place(path, node)} {node.module}.{a.name}" for a in node.names if a.name in newer)
        elif isinstance(node, ast.Attribute):
            of = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in NEWER_METHODS or node.attr in NEWER_NAMES.get(of, set()):
                yield f"{place(path, node)} .{node.attr}"
        elif isinstance(node, ast.Call):
            newer = NEWER_KEYWORDS.get(called(node).rpartition(".")[2], set())
            yield from (f"{place(path, node)} {called(node)}({k.arg}=)" for k in node.keywords if k.arg in newer)
        elif isinstance(node, ast.Name) and node.id in NEWER_BUILTINS:
            yield f"{place(path, node)} {node.id}"


def union_at_run_time(path: Path, tree: ast.Module) -> Iterator[str]:
    """`X | None`, or isinstance(x, A | B), where Python 3.9 would evaluate it."""
    annotations: set[ast.AST] = set()
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            annotation = getattr(node, name, None)
            if isinstance(annotation, ast.AST):
                annotations.update(ast.walk(annotation))
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and node not in annotations:
            sides = [ast.unparse(side) for side in (node.left, node.right)]
            types = {"None", "str", "int", "float", "bool", "bytes", "list", "dict", "tuple", "Path"}
            if any(side.partition("[")[0] in types for side in sides):
                yield f"{place(path, node)} {ast.unparse(node)}"


def test_volunteers_code_evaluates_no_union_of_types() -> None:
    assert [each for path in volunteers_sources() for each in union_at_run_time(path, parsed(path))] == []


def unsafe(path: Path, tree: ast.Module) -> Iterator[str]:
    """What runs, or would run, code from data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (f"{place(path, node)} imports {n}" for n in names if n.partition(".")[0] in UNSAFE_MODULES)
        if not isinstance(node, ast.Call):
            continue
        name = called(node)
        if name in UNSAFE_BUILTINS or name in UNSAFE_CALLS:
            yield f"{place(path, node)} calls {name}"
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else "?"
            if (keyword.arg == "allow_pickle" and value is not False) or (
                keyword.arg == "shell" and value is not False
            ):
                yield f"{place(path, node)} {keyword.arg}={value!r}"


def test_no_code_comes_out_of_data() -> None:
    assert [each for path in sources(*PACKAGES) for each in unsafe(path, parsed(path))] == []


def test_the_rules_find_what_they_forbid() -> None:
    bad = (
        "import pickle\nfrom dill import loads\neval('1')\ntorch.load(f)\nnp.load(f, allow_pickle=True)\n"
        "import tomllib\nfrom itertools import pairwise\nzip(a, b, strict=True)\n"
        "@dataclass(slots=True)\nclass A: ...\nx = int | None\n"
    )
    tree, path = ast.parse(bad), ROOT / "made_up.py"
    assert len(list(unsafe(path, tree))) == 5
    assert len(list(newer_names(path, tree))) == 4
    assert len(list(union_at_run_time(path, tree))) == 1
    assert MACHINE_PATH.search('open("/home/alice/data")') and not MACHINE_PATH.search("PROJECT/work/x, $HOME/work/y")
    with pytest.raises(SyntaxError):
        ast.parse("match x:\n    case 1: ...\n", feature_version=OLDEST_PYTHON)


def product_files() -> list[Path]:
    """Every text file of the project: what stands in its folders, less what builds and tests leave behind."""
    folders = (*PACKAGES, "kernels", "tests", "docs", "scripts", "examples", ".ci")
    found = [path for folder in folders if (ROOT / folder).is_dir() for path in (ROOT / folder).rglob("*")]
    found += [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".txt")]
    return sorted(
        path
        for path in found
        if path.is_file()
        and path.suffix in TEXT_SUFFIXES
        and "__pycache__" not in path.parts
        and path != Path(__file__)
    )


def test_no_file_names_places_of_one_machine_or_a_package_registry() -> None:
    found = []
    for path in product_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            found += [
                f"{path.relative_to(ROOT).as_posix()}:{number} {match[0]}"
                for match in (MACHINE_PATH.search(line), REGISTRY_HOST.search(line))
                if match is not None
            ]
    assert found == []
