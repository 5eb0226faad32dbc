"""job.toml is read strictly: each mistake is one sentence with the file, the line and the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from boinc_project.job_config import SECTIONS, JobConfig, JobError, find_line, load_config
from work_generator.job import Job, checked_data

ROOT = Path(__file__).resolve().parents[3]
GOOD = """\
[job]
name = "digits"
description = "Learns to read handwritten digits."
seed = 1

[model]
factory = "mine:model"
loss = "mine:loss"

[data]
source = "mine:data"
license = "CC0"
batch_size = 4

[train]
policy = "sync"
microtasks_per_version = 2
max_versions = 10

[optimizer]
lr = 0.1
"""
PYTHON = """\
import numpy as np
import torch
from torch import nn

def model():
    return nn.Linear(3, 2)

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

def metrics(model, batch):
    return {"accuracy": model(batch["x"]).argmax(1) == batch["y"]}

def data():
    x = np.arange(30.0).reshape(10, 3)
    return {"train": {"x": x, "y": np.zeros(10, np.int64)}, "test": {"x": x[:4], "y": np.zeros(4, np.int64)}}
"""


def folder(path: Path, toml: str = GOOD, python: str = PYTHON) -> Path:
    path.mkdir(exist_ok=True)
    (path / "job.toml").write_text(toml)
    (path / "mine.py").write_text(python)
    return path


def diloco(toml: str = GOOD) -> str:
    changed = toml.replace('"sync"', '"diloco"\nlocal_steps = 20').replace("[optimizer]\nlr = 0.1\n", "")
    return changed + "[inner_optimizer]\nlr = 0.001\n"


def test_a_good_file_has_every_key_and_documented_defaults(tmp_path: Path) -> None:
    config = load_config(folder(tmp_path) / "job.toml")
    assert config.job.name == "digits"
    assert config.train.batches_per_microtask == 1
    assert config.inner_optimizer is None
    assert config.workunit.min_quorum == config.workunit.target_nresults == 2
    assert config.workunit.tolerance == 1e-4
    assert config.data.evaluation_batch_size == 4
    assert config.schedule.total_versions == 10
    assert load_config(tmp_path) == config, "the folder will do"


def test_diloco_has_its_published_outer_optimizer_unless_told_otherwise(tmp_path: Path) -> None:
    config = load_config(folder(tmp_path, diloco()))
    assert (config.optimizer.kind, config.optimizer.lr, config.optimizer.momentum) == ("sgd", 0.7, 0.9)
    assert config.optimizer.nesterov
    assert config.inner_optimizer is not None
    assert (config.inner_optimizer.kind, config.inner_optimizer.eps) == ("adamw", 1e-6)
    assert config.workunit.tolerance == 1e-3
    plain = load_config(folder(tmp_path, diloco() + "[optimizer]\nlr = 1.0\nmomentum = 0.0\nnesterov = false\n"))
    assert (plain.optimizer.lr, plain.optimizer.momentum, plain.optimizer.nesterov) == (1.0, 0.0, False)


def test_settings_survive_storing(tmp_path: Path) -> None:
    classed = diloco().replace("local_steps = 20", "local_steps = 20\nspeed_classes = [1, 0.5]")
    for toml in (GOOD, diloco(), classed):
        config = load_config(folder(tmp_path, toml))
        again = JobConfig.from_json(config.canonical_json(), tmp_path)
        assert again == config
        assert again.canonical_json() == config.canonical_json()
        assert str(tmp_path) not in config.canonical_json()


def test_a_rule_that_takes_short_updates_for_wrong_ones_is_refused_with_speed_classes(tmp_path: Path) -> None:
    classed = diloco().replace("local_steps = 20", "local_steps = 20\nspeed_classes = [1, 0.5]")
    for section in ('rule = "median"', 'mixing = "nearest_neighbour"'):
        with pytest.raises(JobError, match=r"shorter updates .* remove (rule|mixing), or speed_classes"):
            load_config(folder(tmp_path, f"{classed}[aggregation]\n{section}\n"))
    with pytest.raises(JobError, match="slower hosts take fewer; remove state"):
        load_config(folder(tmp_path, classed + 'state = "shipped"\n'))
    gradients = GOOD.replace(
        "max_versions = 10", "max_versions = 10\nbatches_per_microtask = 4\nspeed_classes = [1, 0.5]"
    )
    load_config(folder(tmp_path, f'{gradients}[aggregation]\nrule = "median"\n'))  # mean gradients, of equal length


# What is wrong: (text replaced, by what, line named, words of the sentence).
MISTAKES: dict[str, tuple[str, str, int, str]] = {
    "unknown key": ("seed = 1", "sead = 1", 4, r"unknown key sead in \[job\]; did you mean seed\?"),
    "unknown section": ("[optimizer]", "[optimiser]", 20, r"unknown section \[optimiser\]; did you mean optimizer\?"),
    "key outside a section": ("[job]", "colour = 3\n[job]", 1, "unknown section .colour."),
    "wrong type": ("batch_size = 4", 'batch_size = "4"', 13, r"must be a whole number .*, not '4'; write for example"),
    "bool for a number": ("batch_size = 4", "batch_size = true", 13, "must be a whole number"),
    "out of range": ("max_versions = 10", "max_versions = 0", 18, "from 1 to 1000000, not 0"),
    "number not above": ("lr = 0.1", "lr = 0", 21, "must be a number above 0"),
    "not finite": ("lr = 0.1", "lr = inf", 21, "must be a number above 0"),
    "unknown policy": ('"sync"', '"asink"', 16, r"must be one of .*sync, diloco"),
    "bad name": ('"digits"', '"My Digits"', 2, "must be 1 to 32 of a-z"),
    "name of a server's word": ('"digits"', '"upload-1"', 2, "without the words download, upload, nodelete"),
    "description of two lines": ('"Learns to read handwritten digits."', '"Learns to\\nread."', 3, "on one line"),
    "malformed reference": ('"mine:model"', '"mine.model"', 7, 'of the form "module:function"'),
    "reference out of the folder": ('"mine:model"', '"../mine:model"', 7, 'of the form "module:function"'),
    "missing file": ('"mine:loss"', '"theirs:loss"', 8, "needs the file .*theirs.py, which does not exist"),
    "missing pretrained": ("[data]", 'pretrained = "w.safetensors"\n[data]', 10, "w.safetensors does not exist"),
    "missing key": ('license = "CC0"\n', "", 10, r"\[data\] lacks license .*; add for example license ="),
    "section missing": ("[optimizer]\nlr = 0.1\n", "", 0, r"\[optimizer\] lacks lr"),
    "key of another policy": (
        "max_versions = 10",
        "max_versions = 10\nlocal_steps = 5",
        19,
        r"has a meaning only with an \[inner_optimizer\]",
    ),
    "speeds that rise": (
        "max_versions = 10",
        "max_versions = 10\nspeed_classes = [0.5, 1.0]",
        19,
        r"must be 2 to 10 falling numbers above 0, of which the first is 1.* speed_classes = \[1.0, 0.5, 0.25\]",
    ),
    "a count of classes": ("max_versions = 10", "max_versions = 10\nspeed_classes = 3", 19, "falling numbers"),
    "classes without steps": (
        "max_versions = 10",
        "max_versions = 10\nspeed_classes = [1, 0.5]",
        19,
        r"at least 1 \(1 -> 1, 0.5 -> 0 of batches_per_microtask = 1\); raise batches_per_microtask or write fewer",
    ),
    "classes of the same steps": (
        "max_versions = 10",
        "max_versions = 10\nbatches_per_microtask = 4\nspeed_classes = [1, 0.5, 0.49, 0.4]",
        20,
        "a number of steps of its own",
    ),
    "inner optimizer of sync": (
        "[optimizer]",
        "[inner_optimizer]\nlr = 1\n[optimizer]",
        20,
        'has no meaning for policy = "sync"',
    ),
    "target without value": (
        "max_versions = 10",
        'max_versions = 10\ntarget_metric = "loss"',
        19,
        "needs target_value",
    ),
    "target without metrics": (
        "max_versions = 10",
        'max_versions = 10\ntarget_metric = "accuracy"\ntarget_value = 0.9',
        19,
        r"needs metrics in \[model\]",
    ),
    "nesterov without momentum": ("lr = 0.1", "lr = 0.1\nnesterov = true", 22, "a momentum above 0"),
    "quorum above copies": (
        "[optimizer]",
        "[workunit]\nmin_quorum = 3\ntarget_nresults = 2\n[optimizer]",
        22,
        "below min_quorum",
    ),
    "fewer results in all than successes": (
        "[optimizer]",
        "[workunit]\nmax_total_results = 3\n[optimizer]",
        21,
        "is below max_success_results",
    ),
    "fewer results in all than errors": (
        "[optimizer]",
        "[workunit]\nmax_success_results = 3\nmax_total_results = 3\n[optimizer]",
        22,
        "is below max_error_results",
    ),
    "one copy without room for a second": (
        "[optimizer]",
        "[workunit]\nmax_success_results = 2\nmax_error_results = 2\nmax_total_results = 2\n"
        "[trust]\nadaptive_replication = true\n[optimizer]",
        25,
        "needs room for second copies",
    ),
    "one copy where four are wanted": (
        "[optimizer]",
        "[workunit]\nmin_quorum = 3\n[trust]\nadaptive_replication = true\n[optimizer]",
        23,
        "would not hold; set min_quorum = 2",
    ),
    "betas": ("lr = 0.1", "lr = 0.1\nbetas = [0.9, 1.0]", 22, "two numbers from 0 to below 1"),
    "invalid TOML": ("seed = 1", "seed = = 1", 4, "is not valid TOML"),
    "key twice": ("seed = 1", "seed = 1\nseed = 2", 5, "is not valid TOML"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_sentence_with_file_line_and_remedy(name: str, tmp_path: Path) -> None:
    old, new, line, words = MISTAKES[name]
    assert old in GOOD
    path = folder(tmp_path, GOOD.replace(old, new, 1)) / "job.toml"
    with pytest.raises(JobError) as refused:
        load_config(path)
    sentence = str(refused.value)
    assert re.search(words, sentence), sentence
    assert sentence.startswith(f"{path} line {line}" if line else f"{path}"), sentence
    assert "\n" not in sentence


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"there is no job file .*job\.toml; give the path"):
        load_config(tmp_path)
    (tmp_path / "job.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(JobError, match="cannot be read as a UTF-8 text"):
        load_config(tmp_path)


def test_lines_are_found_in_every_form_toml_allows() -> None:
    text = 'job.name = "a"\n# name = 3\nmodel = { factory = "a:b" }\n[ data ]\n"source" = 1\n'
    assert find_line(text, "job", "name") == 1
    assert find_line(text, "model", "factory") == 3
    assert find_line(text, "data", "source") == 5
    assert find_line(text, "data", "license") == 4
    assert find_line(text, "train", "policy") == 0


def test_schedule_warms_up_and_decays(tmp_path: Path) -> None:
    toml = GOOD + '[schedule]\nkind = "cosine"\nwarmup_versions = 2\nmin_ratio = 0.1\n'
    config = load_config(folder(tmp_path, toml))
    rates = [config.learning_rate(version) for version in range(12)]
    assert rates[:3] == pytest.approx([0.05, 0.1, 0.1])
    assert rates[6] == pytest.approx(0.1 * 0.55)
    assert rates[10] == rates[11] == pytest.approx(0.01)
    linear = load_config(folder(tmp_path, toml.replace("cosine", "linear")))
    assert linear.learning_rate(6) == pytest.approx(0.1 * 0.55)
    assert load_config(folder(tmp_path)).learning_rate(9) == 0.1


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs" / "job.md").read_text()
    for section, keys in SECTIONS.items():
        assert f"[{section}]" in text
        for key in keys.__dataclass_fields__:
            assert f"`{key}`" in text, f"{key} of [{section}] is not in docs/job.md"


@pytest.mark.parametrize("name", ["digits", "digits_cnn", "gpt_chars"])
def test_examples_are_valid_jobs(name: str) -> None:
    job = Job.load(ROOT / "examples" / name)
    assert job.config.job.name == name
    assert set(job.data) == {"train", "test"}


# --- the admin's Python ---


def test_a_job_loads_its_model_functions_and_data(tmp_path: Path) -> None:
    job = Job.load(folder(tmp_path))
    assert job.data["train"]["x"].dtype == torch.float32
    assert job.data["train"]["y"].dtype == torch.int64
    assert len(job.notes) == 2 and "float64 to float32" in job.notes[0]
    assert job.metrics is None
    losses = job.loss(job.model, {name: t[:4] for name, t in job.data["train"].items()})
    assert losses.shape == (4,)


def test_the_seed_decides_the_initial_weights(tmp_path: Path) -> None:
    first = Job.load(folder(tmp_path)).model.state_dict()
    again = Job.load(folder(tmp_path)).model.state_dict()
    other = Job.load(folder(tmp_path, GOOD.replace("seed = 1", "seed = 2"))).model.state_dict()
    assert torch.equal(first["weight"], again["weight"])
    assert not torch.equal(first["weight"], other["weight"])


def with_python(path: Path, old: str, new: str) -> Path:
    assert old in PYTHON
    return folder(path, python=PYTHON.replace(old, new, 1))


PYTHON_MISTAKES: dict[str, tuple[str, str, str]] = {
    "function missing": ("def model", "def modell", r'mine\.py has no function "model" \(it has: .*modell'),
    "not a function": (
        "def loss(model, batch):",
        "loss = 3\ndef loss_(model, batch):",
        '"loss" in .*mine.py is not a function',
    ),
    "import fails": (
        "import numpy as np",
        "import numpyy as np",
        r"importing mine\.py failed at mine\.py:1: ModuleNotFoundError",
    ),
    "syntax error": ("import torch\n", "import torch torch\n", r"failed at mine\.py:2: SyntaxError"),
    "factory raises": (
        "return nn.Linear(3, 2)",
        "return nn.Linear(-3, 2)",
        r"the model factory .* failed at mine\.py:6: RuntimeError",
    ),
    "factory returns nothing": (
        "return nn.Linear(3, 2)",
        "nn.Linear(3, 2)",
        "returned NoneType; return a torch.nn.Module",
    ),
    "model in half precision": (
        "nn.Linear(3, 2)",
        "nn.Linear(3, 2).half()",
        r"weight .* is torch\.float16; .*model\.float\(\)",
    ),
    "nothing to train": ("nn.Linear(3, 2)", "nn.ReLU()", "nothing can be trained"),
    "data raise": (
        "x = np.arange(30.0)",
        "x = np.arange(31.0)",
        r"the data source .* failed at mine\.py:15: ValueError",
    ),
    "data of a wrong kind": ('return {"train"', 'return [3] or {"train"', "returned list; return"),
    "no split train": ('{"train":', '{"training":', 'has no split "train"'),
    "no split test": ('"test":', '"held_out":', r'has no split "test" .*set evaluate_every = 0'),
    "lengths differ": (
        "np.zeros(10, np.int64)",
        "np.zeros(9, np.int64)",
        "differ in their number of samples .*x has 10, y has 9",
    ),
    "splits differ": (
        '"x": x[:4]',
        '"x": x[:4, :2]',
        r'"test"/"x" is float32 \[2\] per sample, in "train" float32 \[3\]',
    ),
    "fields differ": ('"test": {"x"', '"test": {"z"', r'split "test" has the fields y, z, "train" has x, y'),
    "data of objects": (
        "np.zeros(10, np.int64)",
        "np.array(['a'] * 10)",
        "is an array of <U1; give a numpy array or tensor of numbers",
    ),
    "complex data": ("np.zeros(10, np.int64)", "np.zeros(10, complex)", "is an array of complex128"),
    "data with NaN": ("x = np.arange(30.0)", "x = np.nan * np.arange(30.0)", "NaN or infinite; clean the data"),
    "no samples": (
        "x = np.arange(30.0).reshape(10, 3)",
        "x = np.zeros((10, 3))[:0]",
        "differ in their number of samples",
    ),
}


@pytest.mark.parametrize("name", PYTHON_MISTAKES)
def test_mistake_in_the_admins_python_is_one_sentence(name: str, tmp_path: Path) -> None:
    old, new, words = PYTHON_MISTAKES[name]
    with pytest.raises(JobError) as refused:
        Job.load(with_python(tmp_path, old, new))
    sentence = str(refused.value)
    assert re.search(words, sentence), sentence
    assert "\n" not in sentence


def test_data_may_be_tensors_and_small_integers(tmp_path: Path) -> None:
    config = load_config(folder(tmp_path))
    found = {
        "train": {
            "a": torch.ones(3, 2, dtype=torch.float16),
            "b": np.arange(3, dtype=np.uint16),
            "c": np.ones(3, bool),
        },
        "test": {"a": np.ones((1, 2), ">f4"), "b": np.zeros(1, np.int8), "c": torch.ones(1, dtype=torch.bool)},
    }
    data, notes = checked_data(found, config)
    assert {str(t.dtype) for t in data["train"].values()} == {"torch.float32", "torch.int64", "torch.bool"}
    assert {name: t.dtype for name, t in data["test"].items()} == {name: t.dtype for name, t in data["train"].items()}
    assert len(notes) == 3


def test_files_beside_the_job_can_import_one_another_and_two_jobs_do_not_mix(tmp_path: Path) -> None:
    for name, width in (("one", 3), ("two", 7)):
        place = folder(
            tmp_path / name,
            python=PYTHON.replace("def model():\n    return nn.Linear(3, 2)", "from parts import model"),
        )
        (place / "parts.py").write_text(f"from torch import nn\ndef model():\n    return nn.Linear({width}, 2)\n")
    widths = [Job.load(tmp_path / name).model.weight.shape[1] for name in ("one", "two", "one")]  # type: ignore[union-attr]
    assert widths == [3, 7, 3]
    import sys

    assert "parts" not in sys.modules
    assert not any(str(tmp_path) in entry for entry in sys.path)


def test_training_starts_from_pretrained_weights(tmp_path: Path) -> None:
    toml = GOOD.replace("[data]", 'pretrained = "w.safetensors"\n[data]')
    place = folder(tmp_path, toml)
    weights = {"weight": torch.full((2, 3), 0.5), "bias": torch.ones(2)}
    save_file(weights, place / "w.safetensors")
    assert torch.equal(Job.load(place).model.state_dict()["weight"], weights["weight"])


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"weight": torch.zeros(2, 3)}, "lack bias"),
        (
            {"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "more": torch.zeros(1)},
            "have more, which the model does not",
        ),
        ({"weight": torch.zeros(3, 3), "bias": torch.zeros(2)}, r"weight has shape \[3, 3\], the model's has \[2, 3\]"),
    ],
)
def test_pretrained_weights_of_another_model_are_refused(
    weights: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    place = folder(tmp_path, GOOD.replace("[data]", 'pretrained = "w.safetensors"\n[data]'))
    save_file(weights, place / "w.safetensors")
    with pytest.raises(JobError, match=words):
        Job.load(place)


def test_a_pretrained_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    place = folder(tmp_path, GOOD.replace("[data]", 'pretrained = "w.safetensors"\n[data]'))
    (place / "w.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(JobError, match=r"cannot be read .*give a safetensors file"):
        Job.load(place)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('kind = "gzip"', "must be one of dense, int8, fp4"),
        ('kind = "int8"\nshare = 0.5', "share in [codec] belongs to random-k and top-k and dct-top-k"),
        ('kind = "sign"\nblock = 64', "block in [codec] belongs to int8 and fp4 and qsgd"),
        ('kind = "top-k"\nshare = 0', "share in [codec] must be a number from 1e-06"),
        ('kind = "top-k"\nvalues = "sign"', "values in [codec] must be one of dense, int8, fp4"),
        ('kind = "fp4"\nblock = 65', "block 65 is odd"),
        ('kind = "low-rank"\nlevels = 9', "levels in [codec] belongs to qsgd"),
    ],
)
def test_keys_of_a_codec_are_refused_where_they_mean_nothing(tmp_path: Path, lines: str, words: str) -> None:
    with pytest.raises(JobError) as caught:
        load_config(folder(tmp_path, GOOD + f"[codec]\n{lines}\n"))
    assert words in str(caught.value) and "line 2" in str(caught.value)


@pytest.mark.parametrize(("policy", "dense", "coarse"), [("sync", 1e-4, 2.2e-3), ("diloco", 1e-3, 1.2e-2)])
def test_the_tolerance_by_default_is_what_the_codec_makes_of_an_honest_difference(
    tmp_path: Path, policy: str, dense: float, coarse: float
) -> None:
    toml = diloco() if policy == "diloco" else GOOD
    assert load_config(folder(tmp_path, toml)).workunit.tolerance == dense
    found = load_config(folder(tmp_path, toml + '[codec]\nkind = "fp4"\n'))
    assert found.workunit.tolerance == pytest.approx(coarse, rel=0.05)
    assert JobConfig.from_json(found.canonical_json(), found.folder) == found
