"""The time that daemons and the embedded server go by can be replaced."""

from __future__ import annotations

import ast
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from boinc_project import clock

ROOT = Path(__file__).resolve().parents[2]
GOVERNED = ("work_generator", "validator", "assimilator", "boinc_project/server", "boinc_project/simulator")
FILES = ("boinc_project/store.py", "boinc_project/daemon.py")


def test_it_is_the_real_time_unless_replaced() -> None:
    before = time.time()
    assert before <= clock.now() <= time.time()


def test_a_virtual_time_holds_in_all_threads_and_only_in_its_block() -> None:
    with clock.virtual(lambda: 77.0):
        with clock.virtual(lambda: 99.0):
            assert clock.now() == 99.0
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(clock.now).result() == 77.0
    assert clock.now() > 1e9


def test_a_failing_block_gives_the_real_time_back() -> None:
    with pytest.raises(KeyError), clock.virtual(lambda: 77.0):
        raise KeyError
    assert clock.now() > 1e9


def test_whatever_decides_about_work_asks_this_clock() -> None:
    paths = [path for folder in GOVERNED for path in sorted((ROOT / folder).rglob("*.py"))]
    asked = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in [*paths, *(ROOT / name for name in FILES)]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "datetime.now")
    ]
    assert asked == []
