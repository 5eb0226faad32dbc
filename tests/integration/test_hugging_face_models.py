"""Unmodified Hugging Face models of tiny size export, and the graphs are as exact as eager float32."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graph_oracle import assert_as_exact_as_eager
from work_generator.export import export_evaluation, export_gradient

# transformers warns about optional libraries and about itself; neither is ours to change.
pytestmark = pytest.mark.filterwarnings("ignore")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

Batch = dict[str, Tensor]
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
}


def words() -> Batch:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 60, (3, 8), generator=generator)
    return {"ids": ids, "label": torch.tensor([0, 1, 1]), "length": torch.tensor([8, 5, 3])}


def images() -> Batch:
    generator = torch.Generator().manual_seed(5)
    return {"x": torch.randn(3, 3, 32, 32, generator=generator), "label": torch.tensor([0, 3, 1])}


def next_word(model: nn.Module, batch: Batch) -> Tensor:
    """Per-sample loss of a causal language model."""
    logits = model(input_ids=batch["ids"]).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["ids"][:, 1:], reduction="none").mean(1)


def every_word(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss, a scalar mean."""
    return model(input_ids=batch["ids"], labels=batch["ids"]).loss


def text_class(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(input_ids=batch["ids"]).logits, batch["label"], reduction="none")


def masked_text_class(model: nn.Module, batch: Batch) -> Tensor:
    mask = (torch.arange(8) < batch["length"][:, None]).long()
    logits = model(input_ids=batch["ids"], attention_mask=mask).logits
    return F.cross_entropy(logits, batch["label"], reduction="none")


def image_class(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(pixel_values=batch["x"]).logits, batch["label"], reduction="none")


def albert() -> nn.Module:
    config = transformers.AlbertConfig(
        **TEXT, embedding_size=16, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1
    )
    return transformers.AlbertForMaskedLM(config)


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        num_labels=4,
    )
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    return transformers.ResNetForImageClassification(config)


def convnext() -> nn.Module:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=4)
    return transformers.ConvNextForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[], Batch]]] = {
    "albert": (albert, every_word, words),
    "bert": (bert, text_class, words),
    "bert with padding": (bert, masked_text_class, words),
    "gpt2": (gpt2, next_word, words),
    "vit": (vit, image_class, images),
    "resnet": (resnet, image_class, images),
    "convnext": (convnext, image_class, images),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = MODELS[name][0]()
    # Fresh models have many zeros (biases); noise makes every gradient matter.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_exported_step_of_an_unmodified_model_is_as_exact_as_eager_float32(name: str) -> None:
    model = made(name)
    _, loss, batch = MODELS[name]
    exported = export_gradient(model, loss, batch())
    assert_as_exact_as_eager(exported, model, loss, batch(), seed=11, step=4)


def test_dropout_of_bert_and_gpt2_is_in_their_graphs() -> None:
    for name in ("bert", "gpt2"):
        exported = export_gradient(made(name), MODELS[name][1], MODELS[name][2]())
        streams = [n.attrs["stream"] for n in exported.graph.nodes if n.op == "random_bernoulli"]
        assert len(streams) >= 5
        assert streams == list(range(len(streams)))


def test_evaluation_of_a_model_with_dropout_draws_nothing() -> None:
    exported = export_evaluation(made("gpt2"), next_word, None, words())
    assert not [n for n in exported.graph.nodes if n.op.startswith("random_")]


def test_tied_word_embeddings_are_one_parameter_with_one_gradient() -> None:
    exported = export_gradient(made("gpt2"), next_word, words())
    names = {output.name for output in exported.graph.outputs_of_kind("gradient")}
    assert "gradient/transformer.wte.weight" in names
    assert "gradient/lm_head.weight" not in names
