"""How the root module is spread over ranks, and how gradients are reduced.

Plain DistributedDataParallel is not used: a forward outside the wrapper, or a wrapper built while another LoRA adapter
was active, leaves ranks different without an error; several roles, and LoRA layers that get no gradient, raise or hang.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from flow_factory.models.bundle import ModelBundle

BUCKET_ELEMENTS = 1 << 24
"""Elements per flat all-reduce: 64 MiB of float32, large enough to fill a link, small beside a full model."""


class Parallel(ABC):
    """A strategy prepares the root once and reduces the gradients of the role being stepped."""

    @abstractmethod
    def prepare(self, bundle: ModelBundle) -> nn.Module:
        """The callable root: the bundle itself, or a wrapper of it."""

    @abstractmethod
    def broadcast_parameters(self, parameters: Iterable[Tensor], comm: Comm) -> None:
        """Makes all ranks start from rank 0's values, in place."""

    @abstractmethod
    def reduce_gradients(self, parameters: Sequence[nn.Parameter], comm: Comm) -> None:
        """Replaces each parameter's gradient by its mean over ranks, in place, before the optimizer step.

        A gradient that is missing on some ranks counts as zero there; one missing on *all* ranks stays None, so the
        optimizer treats the parameter as it would in a single process. All ranks pass the same list in the same order.
        """

    @staticmethod
    def create(strategy: str) -> Parallel:
        """The strategy called `strategy`.

        Raises:
            InputError: If there is no such strategy.
        """
        if strategy == "replicated":
            return Replicated()
        raise InputError(f"unknown parallel strategy {strategy!r}. Known: 'replicated'.")


class Replicated(Parallel):
    """Every rank holds all parameters; gradients are averaged in flat buckets."""

    def prepare(self, bundle: ModelBundle) -> nn.Module:
        return bundle

    @torch.no_grad()
    def broadcast_parameters(self, parameters: Iterable[Tensor], comm: Comm) -> None:
        if comm.world_size == 1:
            return
        for bucket in _buckets(list(parameters)):
            # A sum in which only rank 0 has non-zero terms is exact, and needs no second kind of collective.
            flat = _flatten(bucket)
            comm.all_reduce_sum_(flat if comm.is_main else flat.zero_())
            _scatter(flat, bucket)

    @torch.no_grad()
    def reduce_gradients(self, parameters: Sequence[nn.Parameter], comm: Comm) -> None:
        if comm.world_size == 1:
            return
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=comm.device)
        comm.all_reduce_sum_(present)
        needed = [p for p, count in zip(parameters, present.tolist(), strict=True) if count > 0]
        for parameter in needed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in needed if p.grad is not None]
        for bucket in _buckets(gradients):
            flat = _flatten(bucket)
            comm.all_reduce_sum_(flat).div_(comm.world_size)
            _scatter(flat, bucket)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1).to(torch.float32) for t in tensors])


def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
