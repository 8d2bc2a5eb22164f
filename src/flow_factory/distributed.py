"""The few collectives the toolkit uses, over torch.distributed when it runs and trivially when it does not.

Objects travel as JSON bytes, never as pickles. Every collective is called by all ranks in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flow_factory.errors import PeerFailedError


@dataclass(frozen=True)
class Comm:
    """A rank's view of the process group.

    Attributes:
        rank: This process' index, 0 to world_size - 1.
        world_size: Number of processes.
        device: Device on which collectives run ("cpu" for gloo).
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def single(cls) -> Comm:
        """One process, no process group."""
        return cls()

    @classmethod
    def current(cls, device: torch.device | str = "cpu") -> Comm:
        """The initialised default process group, or a single process if there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), torch.device(device))
        return cls(device=torch.device(device))

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def all_reduce_sum_(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over ranks in place and returns it."""
        if self.world_size > 1:
            if tensor.device == self.device or self.device.type == tensor.device.type:
                dist.all_reduce(tensor)
            else:
                moved = tensor.to(self.device)
                dist.all_reduce(moved)
                tensor.copy_(moved)
        return tensor

    def any_true(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on at least one."""
        if self.world_size == 1:
            return flag
        count = torch.tensor([int(flag)], dtype=torch.int64, device=self.device)
        dist.all_reduce(count)
        return bool(count.item() > 0)

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """Concatenates [n, ...] tensors of all ranks in rank order; n may differ between ranks."""
        if self.world_size == 1:
            return tensor
        counts = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        counts[self.rank] = tensor.shape[0]
        dist.all_reduce(counts)
        longest = int(counts.max().item())
        padded = torch.zeros((longest, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device)
        padded[: tensor.shape[0]] = tensor.to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        joined = torch.cat([part[: int(n)] for part, n in zip(parts, counts.tolist(), strict=True)])
        return joined.to(tensor.device)

    def gather_objects(self, value: Any) -> list[Any]:
        """JSON-able values of all ranks, in rank order."""
        if self.world_size == 1:
            return [value]
        return [json.loads(part) for part in self.gather_bytes([json.dumps(value).encode()])]

    def gather_bytes(self, values: Sequence[bytes]) -> list[bytes]:
        """Byte strings of all ranks, in rank order; their number may differ between ranks."""
        if self.world_size == 1:
            return list(values)
        sizes = self.gather_rows(torch.tensor([len(value) for value in values], dtype=torch.int64))
        joined = torch.frombuffer(bytearray(b"".join(values)) or bytearray(1), dtype=torch.uint8)
        flat = self.gather_rows(joined[: sum(map(len, values))])
        return [part.numpy().tobytes() for part in torch.split(flat, [int(n) for n in sizes.tolist()])]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The JSON-able value of rank `source`, on every rank."""
        return self.gather_objects(value if self.rank == source else None)[source]

    def raise_together(self, error: BaseException | None) -> None:
        """Lets every rank fail when one does, so that none is left waiting in a collective.

        Args:
            error: This rank's error, or None.

        Raises:
            BaseException: `error` itself on the ranks that have one, PeerFailedError naming the first such rank
                elsewhere.
        """
        messages = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise PeerFailedError(f"rank {rank} failed: {message}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block in which an error on one rank becomes an error on all (see `raise_together`)."""
        error: BaseException | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.raise_together(error)
