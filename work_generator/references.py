"""Load `module:function` of an admin's job folder, without touching anyone's sys.path for long.

What it is: our own import machinery for the Python files that lie beside job.toml. Each folder gets
its own namespace in sys.modules, so two jobs may both have a `model.py`. What it is not: a sandbox;
the files are the admin's own and run with the admin's rights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from boinc_project.job_config import JobError, one_line, reference_file


def load_reference(folder: Path, reference: str) -> Callable[..., Any]:
    """The function that `module:function` names in the folder of job.toml.

    Raises JobError if the file or the function is missing or the file fails while it is imported.
    """
    path = reference_file(folder, reference)
    function = reference.split(":")[1]
    if not path.is_file():
        raise JobError(f'there is no file {path} for "{reference}"; create it or correct the reference')
    module = _load_module(folder.resolve(), path.resolve())
    found = getattr(module, function, None)
    if found is None:
        offered = ", ".join(sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")))
        raise JobError(
            f'{path} has no function "{function}" (it has: {offered or "none"}); define it or correct "{reference}"'
        )
    if not callable(found):
        raise JobError(f'"{function}" in {path} is not a function; make it one or correct "{reference}"')
    return found  # type: ignore[no-any-return]


def blame(folder: Path, error: BaseException) -> str:
    """`file.py:12` of the admin's line that led to the error; the last one, as nearest to the cause."""
    inside = [f for f in traceback.extract_tb(error.__traceback__) if is_inside(folder, f.filename)]
    if isinstance(error, SyntaxError) and error.filename and is_inside(folder, error.filename):
        return f"{Path(error.filename).name}:{error.lineno}"
    if not inside:
        return ""
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno}"


def is_inside(folder: Path, filename: str) -> bool:
    """Whether a frame's file lies in the job's folder."""
    return Path(filename).resolve().is_relative_to(folder.resolve())


@contextmanager
def admins_code(folder: Path, what: str) -> Iterator[None]:
    """Run the admin's code; whatever it raises becomes a JobError that names the admin's file and line."""
    try:
        with siblings_importable(folder.resolve()):
            yield
    except JobError:
        raise
    except Exception as error:
        place = blame(folder, error)
        raise JobError(
            f"{what} failed at {place or 'no line of its own'}: {one_line(error)}; correct that line"
        ) from error


def _load_module(folder: Path, path: Path) -> ModuleType:
    """Import one file under a name of its own: `boinc_train_job_<digest of folder>.<module>`."""
    package = f"boinc_train_job_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    parts = path.relative_to(folder).with_suffix("").parts
    # A package with a path lets the admin's files use relative imports among themselves.
    for depth in range(len(parts)):
        name = ".".join((package, *parts[:depth]))
        if name not in sys.modules:
            parent = ModuleType(name)
            parent.__path__ = [str(folder.joinpath(*parts[:depth]))]
            sys.modules[name] = parent
    name = ".".join((package, *parts))
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with admins_code(folder, f"importing {path.name}"):
            spec.loader.exec_module(module)
    except JobError:
        del sys.modules[name]
        raise
    return module


@contextmanager
def siblings_importable(folder: Path) -> Iterator[None]:
    """Let `import helper` find helper.py beside job.toml, and forget it afterwards.

    The folder goes last on the path so that an admin's `random.py` shadows nothing, and what came
    from it leaves sys.modules again so that another job's `helper.py` is not mistaken for it.
    """
    before = set(sys.modules)
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if not name.startswith("boinc_train_job_") and isinstance(file, str) and is_inside(folder, file):
                del sys.modules[name]
