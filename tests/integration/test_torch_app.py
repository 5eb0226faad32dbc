"""The packaged PyTorch program: it is built, starts, and computes a microtask. Long, for it packs 628 MB."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from apps.packaging.build import CACHE, TORCH, build_app, unpacked_bytes
from tests.tiny_microtask import expected_gradient, microtask_files, read_result


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_program_with_pytorch_starts_and_computes_a_microtask(tmp_path: Path) -> None:
    built = build_app(tmp_path / "project", cache_dir=CACHE, kind=TORCH)
    print(f"{built.size / 1e6:.0f} MB, unpacked {unpacked_bytes(built.program) / 1e6:.0f} MB")
    slot = tmp_path / "slot"
    slot.mkdir()
    files = microtask_files(3)
    for name, data in files.items():
        (slot / name).write_bytes(data)
    made = subprocess.run([built.program], cwd=slot, capture_output=True, text=True, timeout=900)
    assert made.returncode == 0, made.stderr[-2000:]
    assert "backend torch" in made.stderr
    update = read_result(slot / "update.safetensors", files)
    np.testing.assert_allclose(update.tensors["gradient/w"], expected_gradient(files), rtol=1e-4, atol=1e-4)
    assert update.metadata["device"]["device"] == "cpu" and update.metadata["device"]["tf32"] == "off"
    assert not [path.name for path in slot.iterdir() if path.name.startswith("_MEI")], "what it unpacked is gone"
