"""Where the residual stream passes in a model's blocks, by what they compute: names mean other things in other models.

A block runs on two tokens, and autograd's graph is read. Between attention and MLP the residual stream is a summand of
the block's output that a module reads, such that without that module's copy the other summands would not depend on the
block's input. Where norms act on the stream itself (BERT, GPT-1), it is what the first module after attention returns
such that the output depends on the block's input by it alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.func import functional_call

from .families import ATTENTIONS
from .source import in_eval_mode

TRIED = 2  # tokens
LEAST_READ = 1e-3  # of the mean over dimensions
# Operations, as autograd names them, that leave the values, or at inference do.
KEEPING = (
    "Alias Clone NativeDropout ReshapeAlias Squeeze ToCopy Transpose UnsafeView Unsqueeze View"
)


class Reached(Exception):  # noqa: N818 - not an error
    """Ends a forward pass."""


class ResidualStream(NamedTuple):
    middle: tuple[str, str] | None = None  # the module, and its side, that has it after attention
    before: tuple[str, ...] = ()  # norms that read the block's input
    after: tuple[str, ...] = ()  # norms that read it after attention
    added: frozenset[str] | None = None  # modules that return a summand of a sum; None if unknown


@torch.inference_mode(False)
@torch.enable_grad()
def streams(model: Any, blocks: nn.ModuleList) -> list[ResidualStream]:
    """The residual stream in each block, found in a pass that ends with the last one."""
    weight = model.get_input_embeddings().weight
    token_ids = torch.zeros(1, TRIED, dtype=torch.int64, device=weight.device)
    with ExitStack() as hooks:
        hooks.enter_context(in_eval_mode([model]))
        trials = [_Trial(block, hooks) for block in blocks]
        hooks.enter_context(blocks[-1].register_forward_hook(_stop))
        with suppress(Reached):
            model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), use_cache=False)
    return [trial.stream() for trial in trials]


def _stop(*_: Any) -> None:
    raise Reached


class _Trial:
    """A block's pass."""

    def __init__(self, block: nn.Module, hooks: ExitStack) -> None:
        self._block, self._width = block, 0
        self._inputs_of: dict[str, tuple[Node, Node]] = {}  # what a module is given, and its copy
        self._returned: dict[str, Node] = {}  # in the order in which modules end
        for name, module in block.named_modules():
            on_input = on_arguments(partial(self._copied, name))
            hooks.enter_context(module.register_forward_pre_hook(on_input, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(self._note, name)))

    def _copied(self, name: str, x: Any) -> Any:
        if not self._width and isinstance(x, Tensor):  # the block's own input comes first
            self._width = x.shape[-1]
            x = x.detach().requires_grad_().clone()
        node = self._node(x)
        if node is None:
            return x
        copy = x.clone()
        self._inputs_of.setdefault(name, (node, copy.grad_fn))
        return copy

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple | list) else (output,)
        node = self._node(next((part for part in parts if isinstance(part, Tensor)), None))
        if node is not None:
            self._returned.setdefault(name, node)

    def _node(self, x: Any) -> Node | None:
        whole = isinstance(x, Tensor) and x.numel() == TRIED * self._width
        return x.grad_fn if whole and x.shape[-1] == self._width else None

    def stream(self) -> ResidualStream:
        if "" not in self._inputs_of or "" not in self._returned:
            return ResidualStream()
        x, y = _origin(self._inputs_of[""][0]), _origin(self._returned[""])
        before: list[str] = []
        after: list[str] = []
        for name in norms_of(self._block, self._width):
            m = _origin(self._inputs_of[name][0]) if name in self._inputs_of else None
            if m in _summands(y, m, scaled=True) and x in _summands(m, x, scaled=True):
                (before if m is x else after).append(name)
        sums = [node for node in _ancestors([y]) if _operation(node) == "Add"]
        summands = {_origin(node, scaled=True) for total in sums for node in _inputs(total)}
        ended = self._returned.items()
        added = {name for name, node in ended if _origin(node, scaled=True) in summands}
        return ResidualStream(self._middle(x, y), tuple(before), tuple(after), frozenset(added))

    def _middle(self, x: Node, y: Node) -> tuple[str, str] | None:
        for name, (given, copy) in self._inputs_of.items():
            m = _origin(given)
            summands = _summands(y, m)
            others = [node for node in summands if node is not m]
            if m not in (x, y) and summands.count(m) == 1 and x not in _ancestors(others, copy):
                return name, "in"
        ended = list(self._returned)
        first = next((at for at, name in enumerate(ended) if name in ATTENTIONS), len(ended))
        cuts: dict[Node, str] = {}  # with the outermost of the modules that return it
        for name in ended[first:]:
            m = _origin(self._returned[name])
            if m not in (x, y) and x not in _ancestors([y], m):
                cuts[m] = name
        return next(((name, "out") for name in cuts.values()), None)


def norms_of(block: nn.Module, width: int) -> dict[str, nn.Module]:
    """The norms in a block with a weight for each dimension of the residual stream."""
    return {
        name: module
        for name, module in block.named_modules()
        if "norm" in type(module).__name__.lower()
        and getattr(getattr(module, "weight", None), "shape", None) == (width,)
    }


@torch.no_grad()
def weights_read(norms: Iterable[nn.Module]) -> Tensor | None:
    """How strongly blocks read each dimension of the residual stream x, (D,): the root mean square of the weights g of
    their norms, `g x / rms(x)`, 1 plus the parameter in Gemma; None if all are 0.

    They range from 1 to 119 in the last third of Gemma 3 270M, smallest where x varies most. With rows scaled by the
    root of g (`--normalize model`) an SAE's error lies where the model looks least.
    """
    factors = [_factor(norm) for norm in norms]
    if not factors:
        return None
    reads = torch.stack(factors).square().mean(0).sqrt()
    mean = reads.mean().item()
    return reads.clamp(min=LEAST_READ * mean) if 0 < mean < torch.inf else None


def _factor(norm: nn.Module) -> Tensor:
    """What a norm multiplies each dimension by, (D,), at a vector of mean 0 and variance 1."""
    weight = norm.get_parameter("weight").float().cpu()
    signs = torch.ones_like(weight)
    signs[1::2] = -1
    parameters = {name: torch.zeros_like(weight) for name, _ in norm.named_parameters()}
    parameters["weight"] = weight
    return functional_call(norm, parameters, (signs,)) * signs


def _operation(node: Node) -> str:
    return node.name().rstrip("0123456789").removesuffix("Backward")


def _inputs(node: Node) -> list[Node]:
    return [parent for parent, _ in node.next_functions if parent is not None]


def _origin(node: Node, scaled: bool = False) -> Node:
    """The node whose values, or with `scaled` multiples of them, a node has."""
    while _operation(node) in KEEPING.split() or (
        scaled and _operation(node) == "Mul" and len(_inputs(node)) == 1
    ):
        (node,) = _inputs(node)
    return node


def _summands(total: Node | None, part: Node | None, scaled: bool = False) -> list[Node]:
    """What a node is the sum of; `part` is not taken apart."""
    if total is None:
        return []
    total = _origin(total, scaled)
    if total is part or _operation(total) != "Add":
        return [total]
    return [node for each in _inputs(total) for node in _summands(each, part, scaled)]


def _ancestors(nodes: Iterable[Node], but_for: Node | None = None) -> set[Node]:
    """The nodes that some depend on without `but_for`."""
    left, seen = list(nodes), set[Node]()
    while left:
        node = left.pop()
        if node not in seen and node is not but_for:
            seen.add(node)
            left += _inputs(node)
    return seen


def on_arguments(replace: Callable[[Any], Any]) -> Callable[..., tuple[Any, Any]]:
    def hook(_: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        first = first_tensor(given)
        given[first] = replace(given.get(first))
        positional = tuple(given[index] for index in range(len(args)))
        return positional, {name: given[name] for name in kwargs}

    return hook


def with_first(output: Any, replace: Callable[[Any], Any]) -> Any:
    if not isinstance(output, tuple | list):
        return replace(output)
    parts: dict[Any, Any] = dict(enumerate(output))
    first = first_tensor(parts)
    parts[first] = replace(parts.get(first))
    return type(output)(parts.values())


def first_tensor(given: Mapping[Any, Any]) -> Any:
    """The position or name of activations, or tokens, among a module's arguments."""
    tensors = [key for key, value in given.items() if isinstance(value, Tensor)]
    if 0 in tensors:
        return 0
    # Names in any order: generation in transformers 5.0 gives cache_position first.
    named = [name for name in ("hidden_states", "input_ids", "inputs_embeds") if name in tensors]
    return next(iter([*named, *tensors]), None)


@contextmanager
def calling(functions: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """While open, functions replace modules' forward methods; hooks stay."""
    for module, function in functions.items():
        vars(module)["forward"] = function
    try:
        yield
    finally:
        for module in functions:
            del vars(module)["forward"]
