"""Hook points in a model: one side, input or output, of a module; the sites of a block are known ones.

A module's name is that in the model with a head, as in `model.layers.3.self_attn.o_proj`; `:in` or `:out` is its side.

Shapes: B windows, T tokens, D = d_in.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from os.path import commonpath
from typing import Any, cast

from torch import Tensor, nn

from ..base.errors import ConfigError, ModelError
from ..base.words import did_you_mean
from ..sae.dictionary import name_of
from ..store.origin import SITES, HookPoint
from .blocks import ResidualStream, first_tensor, on_arguments, streams, with_first
from .families import AFTER_ATTENTION, PAIRS, PARTS, WITH_NORM_AFTER_ATTENTION

EXPECTED = {
    "resid_mid": "a sum with attention's output that the MLP reads, and nothing else but the block's output",
    "attn_out": "attention alone",
    "attn_z": "attention with an output projection",
}


class Modules:
    """The modules of a model, whose blocks are the list at `path`."""

    def __init__(self, model: Any, path: str) -> None:
        self.model, self.path = model, path
        self.blocks = cast(nn.ModuleList, model.get_submodule(path))

    def at(self, point: HookPoint) -> tuple[str, str]:
        """The path of a hook point's module, and its side; ConfigError if there is none."""
        if point.layer is None:
            name, _, side = point.site.partition(":")
            paths = self._named(name)
            if len(paths) != 1:
                raise self._unknown(name)
            return paths[0], side
        block = self.blocks[point.layer]
        part = self._part(point.layer, point.site)
        if part is None:
            named = "a module of that name" if ":" in point.site else "an MLP alone"
            raise ConfigError(
                f"--site {point.site} is unknown in a {type(block).__name__}: expected "
                f"{EXPECTED.get(point.site, named)}, got "
                f"{', '.join(dict(block.named_children()))}; use resid_post or resid_pre"
            )
        inner, side = part
        return ".".join(filter(None, (self.path, str(point.layer), inner))), side

    def name(self, path: str) -> str:
        """A module's name in the model with a head; this may be the part without."""
        is_base = getattr(self.model, "base_model", None) is self.model
        return f"{self.model.base_model_prefix}.{path}" if is_base else path

    def named(self, point: HookPoint) -> str:
        path, side = self.at(point)
        return f"{self.name(path)}:{side}"

    def points(self, pattern: str, model: int = 0) -> list[HookPoint]:
        """The hook points of a module's name with its side, where * is one part of the name, as known sites if they
        are, in the `model` of that number. ConfigError if there are none."""
        name, _, side = pattern.partition(":")
        paths = self._named(name)
        if not paths:
            raise self._unknown(name)
        return [self._point(path, side, model) for path in paths]

    @cached_property
    def sites(self) -> dict[tuple[str, str], str]:
        """The known sites by path and side of their modules."""
        found: dict[tuple[str, str], str] = {}
        for layer in range(len(self.blocks)):
            for site in SITES:
                if self._part(layer, site) is not None:
                    found.setdefault(self.at(HookPoint(layer, site)), site)
        return found

    @cached_property
    def streams(self) -> list[ResidualStream]:
        """Of each block; unknown in a model that does not run on tokens alone."""
        try:
            return streams(self.model, self.blocks)
        except Exception:  # a model's code raises anything
            if self.model.get_input_embeddings().weight.device.type != "meta":
                return [ResidualStream()] * len(self.blocks)
            # Some models look at values. Weights that nobody writes take no memory.
            self.model.to_empty(device="cpu")
            for buffer in self.model.buffers():
                buffer.zero_()  # such as positions
            return self.streams

    def _part(self, layer: int, site: str) -> tuple[str, str] | None:
        # Of any site: with a hook of an earlier one, the trial would be read.
        stream = self.streams[layer]
        if site == "resid_mid":
            return stream.middle
        modules = dict(self.blocks[layer].named_modules())
        if ":" in site:
            part, _, side = site.partition(":")
            return (part, side) if part in modules else None
        if site in PAIRS and modules.keys() >= PAIRS[site]:
            return None
        side, parts = PARTS[site]
        if site == "attn_out" and modules.keys() & WITH_NORM_AFTER_ATTENTION:
            parts = [AFTER_ATTENTION]
        among = stream.added if site in ("attn_out", "mlp_out") else None
        known = (part for part in parts if modules.get(part) is not None)
        return next(((part, side) for part in known if among is None or part in among), None)

    def never_ran(self, point: HookPoint) -> ModelError:
        return ModelError(
            f"{self.named(point)} never ran: expected a module that every forward pass over tokens calls, by "
            "a model that is not compiled; name another, see `sae extract --list-modules`"
        )

    def _named(self, pattern: str) -> list[str]:
        wanted = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
        return [
            path
            for path, _ in self.model.named_modules()
            if path and (wanted.fullmatch(path) or wanted.fullmatch(self.name(path)))
        ]

    def _unknown(self, name: str) -> ConfigError:
        names = [self.name(path) for path, _ in self.model.named_modules() if path]
        if "*" in name:
            names = list(dict.fromkeys(map(folded, names)))
        question = did_you_mean(name, names) or "see `sae extract --list-modules`"
        return ConfigError(
            f"--module must be the name of a module of the model, got {name!r}; {question}"
        )

    def _point(self, path: str, side: str, model: int) -> HookPoint:
        match = re.fullmatch(rf"{re.escape(self.path)}\.(\d+)(?:\.(.+))?", path)
        if match is None:
            return HookPoint(None, f"{self.name(path)}:{side}", model)
        site = self.sites.get((path, side), f"{match[2] or ''}:{side}")
        return HookPoint(int(match[1]), site, model)

    @contextmanager
    def intercepted(self, point: HookPoint, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """While open, `replace(activations)` replaces those at a hook point, (B, T, D)."""
        path, side = self.at(point)
        module = self.model.get_submodule(path)
        around = self.model if point.layer is None else self.blocks[point.layer]
        rejoins = (point.site, side) == ("resid_mid", "in")
        name = f"{self.name(path)}:{side}"
        interception = _Interception(name, replace, around is self.model, rejoins)
        with ExitStack() as hooks:
            if rejoins:
                on_block = around.register_forward_hook(interception.on_block, prepend=True)
                hooks.enter_context(on_block)
            hooks.enter_context(
                around.register_forward_pre_hook(interception.begin, with_kwargs=True)
            )
            if side == "in":
                on_input = on_arguments(interception.replaced)
                hooks.enter_context(module.register_forward_pre_hook(on_input, with_kwargs=True))
            else:
                hooks.enter_context(module.register_forward_hook(interception.on_output))
            yield


class _Interception:
    """Hooks at a hook point: `begin` of its block, or model if `in_model`; `replaced` or `on_output` of its module;
    `on_block`. If it `rejoins`, only the MLP reads what is replaced, and the residual stream is changed as much.
    """

    def __init__(
        self, name: str, replace: Callable[[Tensor], Tensor], in_model: bool, rejoins: bool
    ) -> None:
        self._name, self._replace = name, replace
        self._in_model, self._rejoins = in_model, rejoins
        self._windows: tuple[int, ...] = ()  # B, T
        self._change: Tensor | None = None  # of the residual stream

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        shape = given[first_tensor(given)].shape
        self._windows = tuple(shape[:2] if self._in_model else shape[-3:-1])
        self._change = None

    def replaced(self, activations: Any) -> Tensor:
        if not isinstance(activations, Tensor):
            got = "no tensor" if activations is None else f"a {type(activations).__name__}"
            raise self._undefined(got)
        if self._windows and not is_of_tokens(activations, self._windows):
            raise self._undefined(f"{name_of(activations.dtype)} {tuple(activations.shape)}")
        rows = activations.reshape(*self._windows, -1)
        new = self._replace(rows)
        if self._rejoins and new is not rows:
            self._change = new - rows
        return new.reshape(activations.shape)

    def on_output(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return with_first(output, self.replaced)

    def on_block(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        change, self._change = self._change, None
        return output if change is None else with_first(output, lambda y: y + change)

    def _undefined(self, got: str) -> ConfigError:
        return ConfigError(
            f"{self._name} is no hook point: expected activations ({', '.join(map(str, self._windows))}, d_in) of "
            f"windows of tokens, got {got}; name another, see `sae extract --list-modules`"
        )


def blocks_of(model: Any, layers: int, name: str) -> str:
    """The path of a model's blocks: of its module lists of length `layers`, which an image encoder may have too, the
    one nearest to the embedding of tokens, and the outermost."""
    modules, embedding = dict(model.named_modules()), model.get_input_embeddings()
    home = next((path for path, module in modules.items() if module is embedding), "")
    folders = {
        path: path.replace(".", "/")
        for path, module in modules.items()
        if isinstance(module, nn.ModuleList) and len(module) == layers
    }
    if not folders:
        raise ModelError(
            f"cannot find the blocks of {name}: expected a module list of length {layers}, its number of layers"
        )
    return max(folders, key=lambda path: len(commonpath([home.replace(".", "/"), folders[path]])))


def is_of_tokens(tensor: Tensor, windows: Sequence[int]) -> bool:
    """Whether a tensor is activations, (B, T, D), flattened in mixtures of experts and OPT."""
    B, T = windows
    return tensor.is_floating_point() and tuple(tensor.shape[:-1]) in ((B, T), (B * T,), (1, B * T))


def folded(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
