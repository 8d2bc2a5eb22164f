"""Runs an adapter's own code on a skeleton: what its networks are given, how often, and what they hold in memory.

Outside of the networks everything happens as in a run, on the CPU: tokenizers, masks, guidance, packing. Each network
is entered through a boundary: its inputs lose their numbers, it runs on the meta device, and zeros of its output's
shape come back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from flow_factory.models.abc import BaseAdapter
from flow_factory.models.components import pipeline_modules
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.shapes.blocks import BlockTrace, BlockWatch
from flow_factory.models.shapes.kernels import Kernels
from flow_factory.models.shapes.live_bytes import LiveBytes
from flow_factory.models.shapes.values import META, KnownValues
from flow_factory.samples import ComponentTimes, Condition, ConditionInputs, LatentState

_CPU = torch.device("cpu")
_MOVES = {Tensor.to, Tensor.cpu}


class UnknownShapesError(RuntimeError):
    """A network needs numbers to know the shapes of its tensors."""


@dataclass(frozen=True)
class Trace:
    """What the networks of one piece of code hold in memory, beside their parameters and inputs.

    Attributes:
        held: Bytes that wait for the backward pass (without gradients: the output).
        peak: The most bytes alive at a time, in the backward pass too; without the parameters' gradients.
        blocks: What the blocks of the networks hold of it.
    """

    held: int
    peak: int
    blocks: tuple[BlockTrace, ...] = ()


class ShapeRuns:
    """Puts a boundary around every network of a skeleton adapter, which is fit for nothing else afterwards.

    Args:
        adapter: From `build_skeleton`.

    Attributes:
        encoding_peak: The most bytes that encoding has held so far, beside parameters and inputs.
    """

    def __init__(self, adapter: BaseAdapter[Any]) -> None:
        self.adapter = adapter
        self._inside = False
        self._predicting = False
        self._counting = False
        self._traces: list[Trace] = []
        self._known_outputs: dict[Any, Any] = {}
        self.encoding_peak = 0
        self._modes: tuple[AbstractContextManager[Any], ...] = ()
        for name, module in pipeline_modules(adapter.pipeline).items():
            self._enclose(name, module)
            trunk = getattr(module, "model", None)
            if isinstance(trunk, nn.Module):  # pipelines may enter a language model beside its head
                self._enclose(name, trunk)
        for parameters in adapter.weights.roles.values():
            for parameter in parameters.values():
                # Gradients are counted by themselves.
                parameter.register_post_accumulate_grad_hook(_drop_gradient)

    def encode(self, inputs: Sequence[ConditionInputs], need_negative: bool, generation: Any) -> Condition:
        """The condition of B inputs, with the shapes and dtypes that a run would give it, on the CPU.

        Raises:
            UnknownShapesError: If an encoder needs numbers.
        """
        with torch.no_grad(), self._recording(counting=True) as traces:
            condition = self.adapter.encode_inputs(list(inputs), need_negative, generation)
        self.encoding_peak = max([self.encoding_peak, *(trace.peak for trace in traces)])
        return condition

    def rows(self, state: LatentState, times: ComponentTimes, condition: Any, guidance: GuidanceSpec) -> int:
        """Rows that go through trained networks for one prediction, as `ModelBundle.rows` counts them.

        Raises:
            UnknownShapesError: If a network needs numbers.
        """
        before = self.adapter.bundle.rows
        with torch.no_grad(), self._recording(predicting=True, counting=True):
            self.adapter.predict(state, times, condition, guidance)
        return self.adapter.bundle.rows - before

    def predict(
        self,
        state: LatentState,
        times: ComponentTimes,
        condition: Any,
        guidance: GuidanceSpec,
        *,
        train: bool,
        checkpointing: bool = False,
    ) -> Trace:
        """What one prediction holds.

        Args:
            state: Batch B.
            times: Its times.
            condition: From `encode`, batch B.
            guidance: How predictions are combined.
            train: With gradients, and a backward pass.
            checkpointing: With gradient checkpointing, whatever the configuration says.

        Raises:
            UnknownShapesError: If a network needs numbers.
        """
        self.adapter.bundle.train(train)
        switches = _entered(self._checkpointing(checkpointing), torch.set_grad_enabled(train))
        with switches, self._recording(predicting=True) as traces:
            self.adapter.predict(state, times, condition, guidance)
        return _together(traces)

    def decode(self, state: LatentState) -> Trace:
        """What decoding B rows of final latents holds.

        Raises:
            UnknownShapesError: If a decoder needs numbers.
        """
        with torch.no_grad(), self._recording() as traces:
            self.adapter.decode_latents(state)
        return _one_after_the_other(traces)

    def encode_media(self, media: Sequence[Any]) -> Trace:
        """What encoding B stored media holds.

        Raises:
            UnknownShapesError: If an encoder needs numbers.
        """
        with torch.no_grad(), self._recording() as traces:
            self.adapter.encode_output_state(media)
        return _one_after_the_other(traces)

    # The boundary --------------------------------------------------------------------------------------------------

    def _enclose(self, name: str, module: nn.Module) -> None:
        for method in ("forward", "encode", "decode"):
            call = getattr(module, method, None)
            if callable(call):
                setattr(module, method, self._boundary(name, module, call))

    def _boundary(self, name: str, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        encoder = name not in self.adapter.trained_components

        def enter(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            if encoder:
                kwargs.pop("attention_mask", None)  # no shape depends on it, and masks are built by their values
            self._inside = True
            try:
                return self._run(name, module, call, args, kwargs)
            except (NotImplementedError, RuntimeError) as error:
                reason = str(error).strip().split("\n")[0]
                raise UnknownShapesError(f"{name} ({type(module).__name__}) needs numbers: {reason}") from error
            finally:
                self._inside = False

        return enter

    def _run(self, name: str, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        signature = (id(module), call.__name__, *((t.shape, t.dtype) for t in tensors))
        if self._counting and signature in self._known_outputs:
            return self._known_outputs[signature]
        values = KnownValues()
        self._modes = (META, Kernels(self.adapter._autocast_dtype if self._predicting else None), values)
        args, kwargs = tree_map(lambda leaf: values.to_meta(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        live = LiveBytes([*module.parameters(), *module.buffers(), *inputs])
        with _entered(*self._modes), live:
            with BlockWatch(module, live) as blocks:
                result = call(*args, **kwargs)
            held = live.now
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
        self._traces.append(Trace(held, live.peak, blocks.traces))
        zeros = _as_zeros(result)
        self._known_outputs[signature] = zeros
        return zeros

    @contextmanager
    def _recording(self, predicting: bool = False, counting: bool = False) -> Iterator[list[Trace]]:
        self._predicting, self._counting, self._traces = predicting, counting, []
        with _OnCpu(self):
            yield self._traces

    @contextmanager
    def _checkpointing(self, wanted: bool) -> Iterator[None]:
        modules: list[Any] = [self.adapter.bundle.component(name) for name in self.adapter.bundle.component_names]
        for module in modules:
            if wanted:
                module.enable_gradient_checkpointing(self._checkpoint)
            elif getattr(module, "is_gradient_checkpointing", False):
                module.disable_gradient_checkpointing()
        yield
        for module in modules:
            if wanted:
                module.disable_gradient_checkpointing()

    def _checkpoint(self, block: nn.Module, *args: Any) -> Any:
        """A checkpointed block that is computed again by the same kernels: torch leaves them while autograd runs."""

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _entered(*self._modes)

        return checkpoint(block.__call__, *args, use_reentrant=False, context_fn=contexts)


class _OnCpu(TorchFunctionMode):
    """Outside of networks, what is sent to their device stays on the CPU, and numbers of theirs that are asked for
    (statistics of latents in a buffer) are zeros.
    """

    def __init__(self, runs: ShapeRuns) -> None:
        super().__init__()
        self._runs = runs

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._runs._inside:
            return func(*args, **kwargs)
        args, kwargs = tree_map(lambda leaf: _CPU if isinstance(leaf, torch.device) else leaf, (args, kwargs))
        if func not in _MOVES or not args[0].is_meta:
            return func(*args, **kwargs)
        moved = func(torch.empty(0, dtype=args[0].dtype), *args[1:], **kwargs)
        return torch.zeros((), dtype=moved.dtype).expand(args[0].shape)


@contextmanager
def _entered(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _as_zeros(result: Any) -> Any:
    """The result with a zero, expanded to its shape, in place of every tensor."""
    posterior = getattr(result, "latent_dist", None)
    if posterior is not None:
        result.latent_dist = _zero_posterior(posterior)
        return result

    def zeros(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.zeros((), dtype=leaf.dtype).expand(leaf.shape)
        return _zero_posterior(leaf) if hasattr(leaf, "mode") and hasattr(leaf, "sample") else leaf

    return tree_map(zeros, result)


def _zero_posterior(posterior: Any) -> Any:
    """A posterior of zeros in the place of one without numbers, made from what it was made from."""
    names = [name for name in inspect.signature(type(posterior)).parameters if hasattr(posterior, name)]
    given = {name: getattr(posterior, name) for name in names}
    zeros = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in given.items() if isinstance(t, Tensor)}
    return type(posterior)(**zeros)


def _together(traces: Sequence[Trace]) -> Trace:
    """Several forward passes whose graphs live until one backward pass (the two of a guided prediction)."""
    held = sum(trace.held for trace in traces)
    extra = max((trace.peak - trace.held for trace in traces), default=0)
    return Trace(held, held + extra, tuple(block for trace in traces for block in trace.blocks))


def _one_after_the_other(traces: Sequence[Trace]) -> Trace:
    return Trace(max((t.held for t in traces), default=0), max((t.peak for t in traces), default=0))
