"""What the blocks of a network hold for the backward pass, kind by kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flow_factory.models.shapes.live_bytes import LiveBytes


@dataclass(frozen=True)
class BlockTrace:
    """Blocks of one kind that see tensors of one size.

    Attributes:
        name: The list of the network that they are in ("transformer_blocks").
        kind: Their class.
        count: How many there are.
        rows: Rows of their input.
        tokens: Tokens (or pixels) of a row.
        width: Channels of a token.
        held: Bytes that one of them holds.
    """

    name: str
    kind: str
    count: int
    rows: int
    tokens: int
    width: int
    held: int


class BlockWatch:
    """While entered, notes how many bytes are alive before and after each block of a network.

    Args:
        network: Its direct children that are lists hold the blocks.
        live: Counts the bytes.
    """

    def __init__(self, network: nn.Module, live: LiveBytes) -> None:
        self._live = live
        self._blocks = [
            (name, block)
            for name, child in network.named_children()
            if isinstance(child, nn.ModuleList)
            for block in child
        ]
        self._hooks: list[Any] = []
        self._before: dict[nn.Module, int] = {}
        self._seen: dict[tuple[str, str, int, int, int], list[int]] = {}

    def __enter__(self) -> BlockWatch:
        for name, block in self._blocks:
            self._hooks.append(block.register_forward_pre_hook(self._enter))

            def leave(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                self._leave(name, module, (args, kwargs))

            self._hooks.append(block.register_forward_hook(leave, with_kwargs=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._before[module] = self._live.now

    def _leave(self, name: str, module: nn.Module, inputs: Any) -> None:
        shapes = [leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim >= 3]
        if not shapes:
            return
        shape = shapes[0]
        # [B, L, C] of a transformer, [B, C, H, W] of a U-Net.
        tokens, width = (shape[1], shape[2]) if len(shape) == 3 else (math.prod(shape[2:]), shape[1])
        key = (name, type(module).__name__, shape[0], tokens, width)
        self._seen.setdefault(key, []).append(self._live.now - self._before[module])

    @property
    def traces(self) -> tuple[BlockTrace, ...]:
        """What was seen, in the order of the network."""
        return tuple(
            BlockTrace(name, kind, len(held), rows, tokens, width, sum(held) // len(held))
            for (name, kind, rows, tokens, width), held in self._seen.items()
        )
