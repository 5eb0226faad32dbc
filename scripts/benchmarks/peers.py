"""Other projects' packages that measurements compare with; `scripts/bench` puts them into .cache/peers.

They are installed without what they depend on: what they need, PyTorch, numpy and scipy, the environment has, and the
few small packages that it lacks are named in `scripts/bench`. `peer` imports only the module that is compared with,
`whole_peer` the package.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import sys
from types import ModuleType

from scripts.benchmarks.common import REPOSITORY, BenchmarkSkipped

FOLDER = REPOSITORY / ".cache" / "peers"


def peer(package: str, module: str) -> ModuleType:
    """`package.module` of a peer, without running the package's own __init__; BenchmarkSkipped if there is none."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if package not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            raise BenchmarkSkipped(f"{package} is not installed and could not be, so there is nothing to compare with")
        shell = ModuleType(package)
        shell.__path__ = list(spec.submodule_search_locations)
        sys.modules[package] = shell
    try:
        found = importlib.import_module(f"{package}.{module}")
    except ImportError as error:
        raise BenchmarkSkipped(f"{package} cannot be imported ({error})") from error
    print(f"compared with {package} {importlib.metadata.version(package)}", flush=True)
    return found


def whole_peer(package: str, module: str = "") -> ModuleType:
    """`package` or `package.module` of a peer, imported as its authors mean it; BenchmarkSkipped if that fails."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    try:
        return importlib.import_module(f"{package}.{module}" if module else package)
    except ImportError as error:
        raise BenchmarkSkipped(f"{package} is not installed or cannot be imported ({error})") from error
