"""Models of the `transformers` library as they are used today, tiny ones and BERT-base, from a config: nothing is downloaded.

Each is a Workload like those of workloads.py: float32, random data from a fixed seed, the loss the model itself computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from workloads import Setup, Workload

transformers.logging.set_verbosity_error()

VOCABULARY = 500
# hidden size, layers, heads, intermediate size, vocabulary
BERT_SIZES = {
    "base": (768, 12, 12, 3072, 30522),
    "small": (512, 4, 8, 2048, 30522),
    "mini": (256, 4, 4, 1024, 8000),
    "tiny": (128, 2, 2, 512, 2000),
    "micro": (64, 3, 4, 256, 500),
}

Batch = dict[str, Tensor]
Make = Callable[[], tuple[nn.Module, Batch]]


def make_bert_qa(size: str, batch: int, length: int) -> tuple[nn.Module, Batch]:
    """BertForQuestionAnswering with dropout and attention as plain calls, and a batch of (batch, length) tokens."""
    hidden, layers, heads, intermediate, vocabulary = BERT_SIZES[size]
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        attn_implementation="eager",
    )
    starts, ends = torch.randint(length, (2, batch)).sort(dim=0).values.unbind()
    inputs = {
        "input_ids": torch.randint(vocabulary, (batch, length)),
        "token_type_ids": (torch.arange(length) >= length // 8).long().repeat(batch, 1),
        "attention_mask": (torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))).long(),
        "start_positions": starts.clone(),
        "end_positions": ends.clone(),
    }
    return transformers.BertForQuestionAnswering(config), inputs


def make_gpt2() -> tuple[nn.Module, Batch]:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, n_positions=128)
    return transformers.GPT2LMHeadModel(config), _tokens_and_labels()


def make_llama() -> tuple[nn.Module, Batch]:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config), _tokens_and_labels()


def make_vit() -> tuple[nn.Module, Batch]:
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=64,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.1,
    )
    return transformers.ViTForImageClassification(config), _images_and_labels()


def make_t5() -> tuple[nn.Module, Batch]:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), _tokens_and_labels()


def make_convnext() -> tuple[nn.Module, Batch]:
    config = transformers.ConvNextConfig(hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 2, 1], num_labels=5, image_size=64)
    return transformers.ConvNextForImageClassification(config), _images_and_labels()


def make_mamba() -> tuple[nn.Module, Batch]:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8)
    return transformers.MambaForCausalLM(config), _tokens_and_labels(batch=2, length=32)


def make_whisper() -> tuple[nn.Module, Batch]:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=100,
        max_target_positions=40,
        num_mel_bins=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.1,
    )
    labels = torch.randint(VOCABULARY, (4, 30))
    return transformers.WhisperForConditionalGeneration(config), {"input_features": torch.randn(4, 20, 200), "labels": labels}


def _tokens_and_labels(batch: int = 4, length: int = 64) -> Batch:
    tokens, labels = torch.randint(VOCABULARY, (2, batch, length)).unbind()
    return {"input_ids": tokens, "labels": labels.clone()}


def _images_and_labels() -> Batch:
    return {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.arange(4)}


def _build(device: torch.device, make: Make, learning_rate: float) -> Setup:
    model, batch = make()
    model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    names = tuple(batch)

    def compute_loss(model: nn.Module, tensors: tuple[Tensor, ...]) -> Any:
        return model(**dict(zip(names, tensors, strict=True))).loss

    return Setup(model, optimizer, tuple(each.to(device) for each in batch.values()), compute_loss, ())


def make_workload(name: str, title: str, make: Make) -> Workload:
    return Workload(name, title, functools.partial(_build, make=make, learning_rate=5e-5))


def make_bert_workload(size: str, batch: int, length: int) -> Workload:
    """BERT question answering of one size, named 'BERT-tiny 8x64'."""
    make = functools.partial(make_bert_qa, size, batch, length)
    return make_workload(f"BERT-{size} {batch}x{length}", "BertForQuestionAnswering, eager attention, dropout, Adam", make)


TINY = {
    workload.name: workload
    for workload in (
        make_workload("BERT", "question answering, eager attention", functools.partial(make_bert_qa, "micro", 4, 64)),
        make_workload("GPT-2", "language model", make_gpt2),
        make_workload("Llama", "language model", make_llama),
        make_workload("ViT", "image classification", make_vit),
        make_workload("T5", "encoder and decoder", make_t5),
        make_workload("ConvNeXt", "image classification, convolutions", make_convnext),
        make_workload("Mamba", "language model, a state space", make_mamba),
        make_workload("Whisper", "speech, encoder and decoder", make_whisper),
    )
}
