"""What cannot be exported is refused in one sentence: operator, line of the model, remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from work_generator.export import ExportError, export_evaluation, export_gradient

HERE = Path(__file__).parent
FILE = Path(__file__).name


class Double(torch.autograd.Function):
    """A custom function of the old form, which functional transforms cannot follow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def raising(x: Tensor) -> Tensor:
    raise KeyError("no such thing")


# What is wrong: function of the model's output [B, 3], and what the sentence must say.
CASES: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "unknown operator": (
        lambda x: torch.special.i0(x).sum(1),
        "aten.i0.default is not in the opset",
        "docs/own_model.md",
    ),
    "cumprod": (lambda x: x.cumprod(1).sum(1), "aten.cumprod.default is not in the opset", "exp of a cumsum"),
    "nonzero": (lambda x: x.sum(1) + x.nonzero().sum(), "aten.nonzero.default is not in the opset", "torch.where"),
    "dynamic shape by a mask": (
        lambda x: x.sum(1) + x[x > 0].sum(),
        "aten.index.Tensor picks elements by a mask",
        "torch.where",
    ),
    "data-dependent branch": (
        lambda x: branch(x).sum(1),
        "looks at the value of a tensor",
        "torch.where instead of if",
    ),
    "item": (lambda x: x.sum(1) * x.max().item(), "looks at the value of a tensor", "avoid .item()"),
    "half": (lambda x: x.half().float().sum(1), "makes float16", "use float32"),
    "double": (lambda x: (x.double() * 2).sum(1).float(), "makes float64", "use float32"),
    "complex": (lambda x: torch.fft.fft(x).abs().sum(1), "complex", "real arithmetic|float32"),
    "model that raises": (lambda x: raising(x), "failed", "KeyError: 'no such thing'; correct that line"),
    "wrong shapes": (lambda x: x @ x, "failed", "RuntimeError.*correct that line"),
    "loss per element": (lambda x: x, r"the loss has shape \[4, 3\]", r"return one loss per sample, shape \[4\]"),
    "loss of no tensor": (lambda x: 1.0, "returned float", "return a tensor"),
    "integer loss": (lambda x: x.argmax(1), "the loss is int64", "return float32"),
}


def batch() -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, 20).reshape(4, 5)}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


@pytest.mark.parametrize("name", CASES)
def test_refusal_names_what_is_wrong_and_what_to_do(name: str) -> None:
    function, problem, remedy = CASES[name]
    with pytest.raises(ExportError) as refused:
        export_gradient(model(), lambda m, b: function(m(b["x"])), batch(), HERE)
    sentence = str(refused.value)
    assert re.search(problem, sentence), sentence
    assert re.search(remedy, sentence), sentence
    assert "\n" not in sentence
    if not sentence.startswith("the loss"):
        assert re.search(rf"{re.escape(FILE)}:\d+", sentence), sentence


def test_refusal_names_the_very_line() -> None:
    first = branch.__code__.co_firstlineno
    with pytest.raises(ExportError, match=f"{re.escape(FILE)}:{first + 1}"):
        export_gradient(model(), lambda m, b: branch(m(b["x"])).sum(1), batch(), HERE)
    with pytest.raises(ExportError, match=f"{re.escape(FILE)}:{raising.__code__.co_firstlineno + 1}"):
        export_gradient(model(), lambda m, b: raising(m(b["x"])), batch(), HERE)


def test_an_operator_of_the_backward_pass_is_named_with_the_forward_line() -> None:
    with pytest.raises(
        ExportError, match=rf"aten\.\w+\.default is not in the opset \(at backward of {re.escape(FILE)}:\d+"
    ):
        export_gradient(model(), lambda m, b: m(b["x"]).prod(1), batch(), HERE)


def test_a_custom_autograd_function_is_refused() -> None:
    with pytest.raises(ExportError, match=r"custom torch.autograd.Function.*ordinary torch operations"):
        export_gradient(model(), lambda m, b: Double.apply(m(b["x"])).sum(1), batch(), HERE)


def test_a_missing_field_of_the_batch_names_the_loss_functions_line() -> None:
    with pytest.raises(ExportError, match=rf"{re.escape(FILE)}:\d+: KeyError: 'y'"):
        export_gradient(model(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), batch(), HERE)


def test_complex_and_half_parameters_are_refused() -> None:
    half = nn.Linear(5, 3).half()
    with pytest.raises(ExportError, match="float16"):
        export_gradient(half, lambda m, b: m(b["x"].half()).float().sum(1), batch(), HERE)


def test_random_numbers_in_evaluation_are_refused() -> None:
    with pytest.raises(ExportError, match=r"draws random numbers in evaluation mode .*self\.training"):
        export_evaluation(model(), lambda m, b: m(b["x"]).sum(1) + torch.rand(4), None, batch(), HERE)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (1, "the metrics function returned int; return a dict"),
        ({"loss": torch.ones(4)}, "metric 'loss' cannot be used"),
        ({"a b": torch.ones(4)}, "metric 'a b' cannot be used"),
        ({"accuracy": torch.ones(())}, r"metric \"accuracy\" has shape \[\]; return one value per sample, shape \[4\]"),
        ({"accuracy": 0.5}, r"metric \"accuracy\" has type float"),
    ],
)
def test_metrics_that_are_not_per_sample_are_refused(found: Any, sentence: str) -> None:
    with pytest.raises(ExportError, match=sentence):
        export_evaluation(model(), lambda m, b: m(b["x"]).sum(1), lambda m, b: found, batch(), HERE)


def test_tracing_leaves_the_admins_random_numbers_and_model_alone() -> None:
    network = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {name: t.clone() for name, t in network.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one_hot = F.one_hot
    export_gradient(network, lambda m, b: m(b["x"]).sum(1), batch(), HERE)
    assert torch.equal(torch.rand(1), expected)
    assert F.one_hot is one_hot
    assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())
    assert not network[0]._forward_hooks and not network[0]._forward_pre_hooks


class Choosy(nn.Module):
    """Looks at values unless it is being exported, or unless its attention is the plain one."""

    def __init__(self, cure: str) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.cure, self.attention = cure, "fused"

    def set_attn_implementation(self, name: str) -> None:
        self.attention = name

    def forward(self, x: Tensor) -> Tensor:
        cured = torch.compiler.is_exporting() if self.cure == "export" else self.attention == "eager"
        if not cured and bool((x != 0).all()):
            return self.layer(x)
        return self.layer(x) * 1.5


@pytest.mark.parametrize("cure", ["export", "eager"])
def test_cures_for_models_that_look_at_values_are_tried_before_refusing(cure: str) -> None:
    export_gradient(Choosy(cure), lambda m, b: m(b["x"]).sum(1), batch(), HERE)
    assert not torch.compiler.is_exporting()


@pytest.mark.parametrize("loss", [lambda m, b: b["x"].mean(1), lambda m, b: m(b["x"]).detach().sum(1)])
def test_a_loss_that_no_parameter_influences_is_refused(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(ExportError, match="no parameter of the model influences the loss; compute the loss from"):
        export_gradient(model(), loss, batch(), HERE)
