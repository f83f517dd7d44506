"""The four training steps every comparison in this project is made on, defined once.

    W1  BERT question answering as written in 2019: softmax attention, additive mask, GELU made of mul, div, erf, add
    W2  GPT with a large tied vocabulary: the logits are the peak
    W3  residual CNN: batch norm, in-place ReLU, `out += identity`
    W4  U-Net: the same and concatenated skips, so the layers are no chain

Each is a plain PyTorch model, float32, on random data from a fixed seed. Nothing here imports memfit.

    setup = WORKLOADS["W1"].make("cpu")
    loss = setup.forward_backward()       # then look at the gradients
    setup.update()                        # optimizer.step(), zero_grad(set_to_none=True)

Shapes in comments: B batch, T sequence, C channels or width, H heads, D width of a head, V vocabulary, Y x X pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

SEED = 20190518


@dataclass(frozen=True)
class Setup:
    """One workload ready to train.

    batch: the tensors of the one batch that every step repeats.
    compute_loss: (model, batch) -> scalar loss with its graph.
    blocks: the modules a person would wrap in torch.utils.checkpoint, in forward order.
    """

    model: nn.Module
    optimizer: Optimizer
    batch: tuple[Tensor, ...]
    compute_loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    blocks: tuple[nn.Module, ...]

    def forward_backward(self) -> Tensor:
        """Forward and backward of one step; gives the loss, detached, with all gradients in place."""
        loss = self.compute_loss(self.model, self.batch)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """The rest of the step: the optimizer, then the gradients go."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> Tensor:
        """One whole training step."""
        loss = self.forward_backward()
        self.update()
        return loss


@dataclass(frozen=True)
class Workload:
    """A named recipe. `make(device)` gives a fresh Setup, the same bits every time on one machine."""

    name: str
    title: str
    build: Callable[[torch.device], Setup]

    def make(self, device: str | torch.device = "cpu") -> Setup:
        torch.manual_seed(SEED)
        setup = self.build(torch.device(device))
        torch.manual_seed(SEED + 1)  # the steps' own random stream: the same on every device, whatever the building drew
        return setup


# W1 ------------------------------------------------------------------------------------------------------------------

W1_BATCH, W1_LENGTH, W1_VOCABULARY, W1_WIDTH, W1_HEADS, W1_LAYERS = 8, 256, 8000, 256, 8, 6


def gelu_2019(x: Tensor) -> Tensor:
    """GELU as BERT's first PyTorch code had it: five calls, each of which saves for backward."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class BertSelfAttention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_width = num_heads, width // num_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, self.head_width).permute(0, 2, 1, 3)  # (B, T, C) -> (B, H, T, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        scores = torch.matmul(query, key.transpose(-1, -2))  # (B, H, T, T)
        scores = scores / math.sqrt(self.head_width)
        scores = scores + mask
        weights = self.dropout(nn.Softmax(dim=-1)(scores))
        context = torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous()  # (B, T, H, D)
        return context.view(*x.shape)


class BertLayer(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = BertSelfAttention(width, num_heads, dropout)
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.intermediate = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attended = self.dropout(self.attention_output(self.attention(x, mask)))
        x = self.attention_norm(attended + x)
        hidden = gelu_2019(self.intermediate(x))  # (B, T, C) -> (B, T, 4C)
        return self.output_norm(self.dropout(self.output(hidden)) + x)


class BertForQuestionAnswering(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, num_heads: int, num_layers: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(length, width)
        self.token_type_embeddings = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(BertLayer(width, num_heads, dropout) for _ in range(num_layers))
        self.qa_outputs = nn.Linear(width, 2)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0).expand_as(tokens)
        additive = (1.0 - mask[:, None, None, :].to(torch.float32)) * -10000.0  # (B, T) -> (B, 1, 1, T)
        x = self.word_embeddings(tokens) + self.position_embeddings(positions) + self.token_type_embeddings(segments)
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, additive)
        start, end = self.qa_outputs(x).split(1, dim=-1)  # (B, T, C) -> 2 of (B, T, 1)
        return start.squeeze(-1), end.squeeze(-1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _loss_w1(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    tokens, segments, mask, starts, ends = batch
    start_logits, end_logits = model(tokens, segments, mask)
    return (F.cross_entropy(start_logits, starts) + F.cross_entropy(end_logits, ends)) / 2


def _build_w1(device: torch.device) -> Setup:
    model = BertForQuestionAnswering(W1_VOCABULARY, W1_LENGTH, W1_WIDTH, W1_HEADS, W1_LAYERS).to(device)
    tokens = torch.randint(W1_VOCABULARY, (W1_BATCH, W1_LENGTH))
    lengths = torch.randint(W1_LENGTH // 2, W1_LENGTH + 1, (W1_BATCH, 1))
    places = torch.arange(W1_LENGTH)
    segments, mask = (places >= W1_LENGTH // 8).long().repeat(W1_BATCH, 1), (places < lengths).long()
    starts, ends = torch.randint(W1_LENGTH // 2, (2, W1_BATCH)).sort(dim=0).values.unbind()
    batch = _to_device((tokens, segments, mask, starts.clone(), ends.clone()), device)
    return Setup(model, torch.optim.Adam(model.parameters(), lr=5e-5), batch, _loss_w1, tuple(model.layers))


# W2 ------------------------------------------------------------------------------------------------------------------

W2_BATCH, W2_LENGTH, W2_VOCABULARY, W2_WIDTH, W2_HEADS, W2_LAYERS = 8, 256, 32768, 256, 8, 4


class GPTBlock(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        query, key, value = (
            part.view(size, length, self.num_heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2)
        )  # each (B, H, T, D)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(context.transpose(1, 2).reshape(size, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.contract(F.gelu(self.expand(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Gives the loss and nothing else, so that no caller can hold on to the logits."""

    def __init__(self, vocabulary: int, length: int, width: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.token_embeddings, self.position_embeddings = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)
        self.head.weight = self.token_embeddings.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token_embeddings(tokens) + self.position_embeddings(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (B, T, C) -> (B, T, V)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def _build_w2(device: torch.device) -> Setup:
    model = GPT(W2_VOCABULARY, W2_LENGTH, W2_WIDTH, W2_HEADS, W2_LAYERS).to(device)
    tokens = torch.randint(W2_VOCABULARY, (W2_BATCH, W2_LENGTH + 1))
    batch = _to_device((tokens[:, :-1].clone(), tokens[:, 1:].clone()), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Setup(model, optimizer, batch, lambda model, batch: model(*batch), tuple(model.blocks))


# W3 ------------------------------------------------------------------------------------------------------------------

W3_BATCH, W3_SIDE, W3_CLASSES, W3_WIDTHS, W3_BLOCKS = 192, 32, 100, (32, 64, 128), 3


class BasicBlock(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = self.shortcut(x)
        out = self.relu(self.norm_1(self.conv_1(x)))
        out = self.norm_2(self.conv_2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, widths: tuple[int, ...], num_blocks: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)
        )
        blocks, channels = [], widths[0]
        for stage, width in enumerate(widths):
            for place in range(num_blocks):
                blocks.append(BasicBlock(channels, width, stride=2 if stage > 0 and place == 0 else 1))
                channels = width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)  # (B, 3, Y, X) -> (B, C, Y, X)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))  # (B, C, Y, X) -> (B, classes)


def _loss_w3(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _build_w3(device: torch.device) -> Setup:
    model = ResNet(W3_WIDTHS, W3_BLOCKS, W3_CLASSES).to(device)
    images, labels = torch.randn(W3_BATCH, 3, W3_SIDE, W3_SIDE), torch.randint(W3_CLASSES, (W3_BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Setup(model, optimizer, _to_device((images, labels), device), _loss_w3, tuple(model.blocks))


# W4 ------------------------------------------------------------------------------------------------------------------

W4_BATCH, W4_SIDE, W4_CLASSES, W4_BASE, W4_DEPTH = 16, 128, 4, 24, 4


class DoubleConv(nn.Sequential):
    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, in_channels: int, num_classes: int, base: int, depth: int) -> None:
        super().__init__()
        widths = [base << level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            DoubleConv(before, width) for before, width in zip([in_channels, *widths[:-2]], widths[:-1], strict=True)
        )
        self.middle = DoubleConv(widths[-2], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths[:-1]))
        self.merge = nn.ModuleList(DoubleConv(2 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(base, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)  # (B, C, Y, X) -> (B, C, Y/2, X/2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))  # 2 of (B, C, Y, X) -> (B, 2C, Y, X) -> (B, C, Y, X)
        return self.head(x)


def _loss_w4(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)  # (B, classes, Y, X), (B, Y, X)


def _build_w4(device: torch.device) -> Setup:
    model = UNet(3, W4_CLASSES, W4_BASE, W4_DEPTH).to(device)
    images = torch.randn(W4_BATCH, 3, W4_SIDE, W4_SIDE)
    labels = torch.randint(W4_CLASSES, (W4_BATCH, W4_SIDE, W4_SIDE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    blocks = (*model.down, model.middle, *model.merge)
    return Setup(model, optimizer, _to_device((images, labels), device), _loss_w4, blocks)


def _to_device(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device) for tensor in tensors)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "BERT-QA as written in 2019, Adam", _build_w1),
        Workload("W2", "GPT, tied vocabulary of 32768, AdamW", _build_w2),
        Workload("W3", "residual CNN, batch norm, SGD", _build_w3),
        Workload("W4", "U-Net, batch norm, SGD", _build_w4),
    )
}
