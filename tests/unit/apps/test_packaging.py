"""The decisions of the app version's build; building itself is tested in integration."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from apps.packaging import build
from apps.packaging.build import BuildError
from boinc_project import app_versions


def test_a_numpy_that_old_processors_cannot_run_is_refused() -> None:
    build.check_numpy(["SSE", "SSE2", "SSE3"])
    with pytest.raises(BuildError, match=r"needs POPCNT, SSE42, .*pip install 'numpy<2.4'"):
        build.check_numpy(["SSE", "SSE2", "SSE3", "SSE42", "POPCNT"])


def test_the_numpy_installed_here_can_be_packaged() -> None:
    build.check_numpy(build.numpy_baseline())


@pytest.mark.parametrize("version", ["1", "1.0.0", "1.x", "../1.00", ""])
def test_a_version_that_is_not_boincs_is_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(BuildError, match=r"must look like 1\.00"):
        build.build_app(tmp_path, version=version)


def test_the_digest_follows_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = tmp_path / "main.py"
    entry.write_text("print(1)")
    kind = build.Kind("numpy", entry)
    first = build.sources_digest(kind)
    assert first == build.sources_digest(kind)
    assert build.sources_digest(build.Kind("opencl", entry)) != first
    entry.write_text("print(2)")
    assert build.sources_digest(kind) != first
    entry.write_text("print(1)")
    monkeypatch.setattr(build, "PACKAGES", ("numpy",))
    assert build.sources_digest(kind) != first


def test_a_half_written_or_damaged_cache_entry_is_not_used(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"program")
    folder = tmp_path / "cache"
    assert build.read_cache(folder) is None
    facts = build.Facts(hashlib.sha256(b"program").hexdigest(), 1.5, 0.5, "2.36")
    build.write_cache(folder, program, facts)
    assert build.read_cache(folder) == (folder / "gradient", facts)
    (folder / "gradient").write_bytes(b"progra")
    assert build.read_cache(folder) is None
    (folder / "facts.json").write_text("{}")
    assert build.read_cache(folder) is None


def test_only_the_newest_builds_stay_in_the_cache(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"program")
    facts = build.Facts(hashlib.sha256(b"program").hexdigest(), 1.5, 0.5, "2.36")
    for number in range(5):
        build.write_cache(tmp_path / "cache" / f"gradient-{number}", program, facts)
        os.utime(tmp_path / "cache" / f"gradient-{number}", (number, number))
    build.write_cache(tmp_path / "cache" / "gradient-5", program, facts)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [
        "gradient-2",
        "gradient-3",
        "gradient-4",
        "gradient-5",
    ]


def after(command: list[str], option: str) -> list[str]:
    """The values of an option that may be repeated."""
    return [command[place + 1] for place, word in enumerate(command) if word == option]


@pytest.mark.parametrize("kind", build.KINDS.values(), ids=build.KINDS)
def test_a_program_holds_the_library_of_its_backend_only_and_files_stay_in_the_slot(kind: build.Kind) -> None:
    command = list(build.specification_command(kind, Path("/work")))
    assert after(command, "--runtime-tmpdir") == ["."]
    excluded = after(command, "--exclude-module")
    assert ("torch" in excluded) is (kind.backend != "torch") and "numpy" not in excluded
    assert ("pyopencl" in excluded) is (kind.backend != "opencl")
    assert command[-1] == str(kind.entry)


@pytest.mark.parametrize(
    ("processor", "cuda", "hip", "refusal"),
    [
        ("cpu", "", "", None),
        ("nvidia", "12.4", "", None),
        ("amd", "", "6.2", None),
        ("nvidia", "", "", r"\(2\.9\+cpu\) is not built for CUDA.*--backend opencl"),
        ("nvidia", "", "6.2", "not built for CUDA"),
        ("amd", "12.4", "", "not built for ROCm"),
        ("intel_gpu", "12.4", "", "nothing for plan classes of intel_gpu.*--backend opencl"),
    ],
)
def test_a_plan_class_for_cards_needs_a_pytorch_that_drives_them(
    processor: str, cuda: str, hip: str, refusal: str | None
) -> None:
    if refusal is None:
        build.check_torch(processor, "2.9+cpu", cuda, hip)
        return
    with pytest.raises(BuildError, match=refusal) as raised:
        build.check_torch(processor, "2.9+cpu", cuda, hip)
    assert "\n" not in str(raised.value)


def test_a_pytorch_for_processors_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "installed_torch", lambda: ("2.9+cpu", "", ""))
    monkeypatch.setattr(build, "run_pyinstaller", lambda *_: pytest.fail("it was built"))
    with pytest.raises(BuildError, match="not built for CUDA"):
        build.build_app(tmp_path, kind=build.TORCH, plan_class="cuda_gt", processor="nvidia")
    assert not list(tmp_path.iterdir())


def test_the_opencl_program_holds_every_kernel() -> None:
    (data,) = after(list(build.specification_command(build.OPENCL, Path("/work"))), "--add-data")
    pattern, place = data.split(os.pathsep)
    assert list(Path(pattern).parent.glob(Path(pattern).name)) and place == "apps/gradient/kernels"


@pytest.mark.parametrize("kind", build.KINDS.values(), ids=build.KINDS)
def test_libraries_of_the_system_and_tests_of_packages_are_struck_and_nothing_else(
    tmp_path: Path, kind: build.Kind
) -> None:
    path = tmp_path / "gradient.spec"
    path.write_text("found = True\npyz = PYZ(a)\n")
    build.leave_out(kind, tmp_path)
    libraries = ["libstdc++.so.6", "libz.so.1", "torch/lib/libtorch_cpu.so", "torch/test/test_api"]
    data = ["torch/test/x.txt", "torch/bin/protoc", "torch/bin/torch_shm_manager", "torch/testing/y.py", "torch/a.pt"]
    analysis = SimpleNamespace(
        binaries=[(name, "", "BINARY") for name in libraries], datas=[(name, "", "DATA") for name in data]
    )
    exec(path.read_text(), {"a": analysis, "PYZ": lambda a: None})
    kept = [each[0] for each in (*analysis.binaries, *analysis.datas)]
    struck = [name for name in (*libraries, *data) if name not in kept]
    wanted = {
        "numpy": [],
        "opencl": ["libstdc++.so.6", "libz.so.1"],
        "torch": ["torch/test/test_api", "torch/test/x.txt", "torch/bin/protoc"],
    }
    assert struck == wanted[kind.backend]


def test_a_failed_build_says_so_with_the_logs_end(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="PyInstaller failed"):
        build.run_pyinstaller(build.Kind("numpy", tmp_path / "missing.py"), tmp_path, lambda stage, share: None)


@pytest.mark.parametrize("probe", [(), ("--devices",)])
def test_a_program_that_does_not_start_is_not_published(tmp_path: Path, probe: tuple[str, ...]) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport sys\nif sys.argv[1:] == {list(probe)}: import no_such_module\n")
    program.chmod(0o755)
    with pytest.raises(BuildError, match=r"does not start(.|\n)*no_such_module"):
        build.try_start(program, tmp_path, probe)


@pytest.mark.parametrize(("app", "plan_class"), [("gradient", ""), ("second", ""), ("gradient", "opencl_ati_gt")])
def test_a_version_folder_holds_for_update_versions_only_what_volunteers_need(
    tmp_path: Path, app: str, plan_class: str
) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"#!/bin/sh\n")
    facts = build.Facts("", 0.0, 0.0, "2.28")
    made = build.write_folder(tmp_path, "1.02", program, "", facts, False, app, plan_class)
    # BOINC's update_versions publishes whatever does not begin with a dot, for ever under that name.
    public = sorted(path.name for path in made.folder.iterdir() if not path.name.startswith("."))
    assert public == [made.program.name, "version.xml"]
    (read,) = app_versions.find_versions(tmp_path / "apps")
    assert (read.app_name, read.version_num, read.platform) == (app, 102, build.PLATFORM)
    assert read.plan_class == plan_class and read.files[0].physical_name == made.program.name


def test_builds_of_an_installed_package_are_kept_in_the_users_own_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    installed = tmp_path / "site-packages"
    assert build.cache_folder(installed) == tmp_path / "home" / ".cache" / "boinc-train" / "app-builds"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.cache_folder(installed) == tmp_path / "cache" / "boinc-train" / "app-builds"
    assert build.CACHE == build.REPOSITORY / ".cache" / "app-builds"


def test_a_relative_cache_is_where_the_user_stands_and_not_where_the_build_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Path] = []

    def stop(_entry: Path, work: Path, *_rest: object) -> Path:
        places.append(work)
        raise build.BuildError("far enough")

    monkeypatch.setattr(build, "run_pyinstaller", stop)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(build.BuildError, match="far enough"):
        build.build_app(tmp_path / "made", version="1.0", cache_dir=Path("cache"))
    assert places[0].is_absolute() and places[0].is_relative_to(tmp_path / "cache")
