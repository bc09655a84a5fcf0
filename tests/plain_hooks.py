"""Plain hooks on transformers' models, as anyone writes them, and the effects of a splice by them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from saecli.store.values import TextWindow

Replace = Callable[[Tensor], Tensor]


def blocks(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


@contextmanager
def replaced(module: nn.Module, replace: Replace, side: str = "out") -> Iterator[None]:
    """While open, a module's output, or its input, is a function of it."""

    def on_input(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        if args:
            return (replace(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": replace(kwargs["hidden_states"])}

    def on_output(module: nn.Module, args: tuple, output: Any) -> Any:
        if isinstance(output, tuple):
            return (replace(output[0]), *output[1:])
        return replace(output)

    if side == "in":
        handle = module.register_forward_pre_hook(on_input, with_kwargs=True)
    else:
        handle = module.register_forward_hook(on_output)
    yield
    handle.remove()


@contextmanager
def noted(module: nn.Module, side: str = "out") -> Iterator[list[Tensor]]:
    """The outputs, or inputs, that a module has while open."""
    seen: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return x

    with replaced(module, note, side):
        yield seen


@contextmanager
def all_replaced(
    modules: Iterable[nn.Module], replace: Callable[[int, Tensor, Tensor], Tensor]
) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """While open, a module's output is a function of its number, input and output; yields those, and the new."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def hook(number: int, module: nn.Module, args: tuple, output: Any) -> Any:
        y = output[0] if isinstance(output, tuple) else output
        new = replace(number, args[0], y)
        seen.append((args[0], y, new))
        return (new, *output[1:]) if isinstance(output, tuple) else new

    handles = [
        module.register_forward_hook(partial(hook, number)) for number, module in enumerate(modules)
    ]
    yield seen
    for handle in handles:
        handle.remove()


def but_first(y: Tensor, new: Tensor) -> Tensor:
    """The new activations, (B, T, D), with the first token's as they were."""
    return torch.cat([y[:, :1], new[:, 1:]], 1)


@torch.no_grad()
def log_p_with(model: nn.Module, module: nn.Module, token_ids: Tensor, change: Tensor) -> Tensor:
    """Log-probabilities after the last token, whose activations at a module are changed, (V,) float64."""

    def add(x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1], x[:, -1:] + change], 1)

    with replaced(module, add):
        return model(token_ids[None], use_cache=False).logits[0, -1].double().log_softmax(-1)


@torch.no_grad()
def effects_by_hooks(
    model: nn.Module,
    module: nn.Module,
    windows: Iterable[TextWindow],
    spliced: Replace,
    side: str = "out",
) -> dict[str, Any]:
    """The effects of replacing a module's activations (n, D) at the rows of windows."""

    def run(ids: Tensor, replace: Replace) -> Tensor:
        with replaced(module, replace, side):
            return model(input_ids=ids[None]).logits[0].log_softmax(-1)

    losses, divergences = {"ce_clean": [], "ce_spliced": [], "ce_zero": []}, []
    for window in windows:
        ids, rows = torch.from_numpy(window.token_ids), torch.from_numpy(window.is_row)

        def at_rows(x: Tensor, rows: Tensor = rows) -> Tensor:
            return x.masked_scatter(rows[:, None], spliced(x[0, rows]))

        clean = run(ids, lambda x: x)
        other = run(ids, at_rows)
        zero = run(ids, torch.zeros_like)
        for name, log_probabilities in zip(losses, (clean, other, zero), strict=True):
            loss = functional.nll_loss(log_probabilities[:-1], ids[1:], reduction="none")
            losses[name].append(loss[rows[:-1]])
        divergences.append((clean.exp() * (clean - other)).sum(-1)[rows])
    result = {name: float(torch.cat(values).mean()) for name, values in losses.items()}
    rise = torch.cat(losses["ce_zero"]) - torch.cat(losses["ce_clean"])
    recovered = None
    if rise.mean() > 5 * rise.std(unbiased=False) / len(rise) ** 0.5:
        recovered = float((result["ce_zero"] - result["ce_spliced"]) / rise.mean())
    tokens = torch.cat(divergences)
    return result | {"ce_recovered": recovered, "kl": float(tokens.mean()), "tokens": len(tokens)}


def assert_same_effects(measures: dict, expected: dict, rel: float = 1e-4) -> None:
    assert (measures["ce_recovered"] is None) == (expected["ce_recovered"] is None)
    known = {name: value for name, value in expected.items() if value is not None}
    assert {name: measures[name] for name in known} == pytest.approx(known, rel=rel)
