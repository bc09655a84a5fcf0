"""Reports opened in a browser; the fixtures `folders` and `open_page` are in `conftest`."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import D, make_run
from launching import captured
from reports import make_text_run, make_text_store, save_model

import saecli
from saecli.sae.activations import Relu, TopK
from saecli.sae.dictionary import SAE

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def why_no_browser() -> str | None:
    """Why there is none; None where there is one."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install -e '.[browser]'"
    if not any(map(shutil.which, NAMES)):
        return f"no browser is installed: none of {', '.join(NAMES)} is on the path (Debian: apt install chromium)"
    return None


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser that may reach no network."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        executable = next(path for path in map(shutil.which, NAMES) if path)
        browser = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


needs_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser() or ""),
]
MANY = 4096
TRIED, VERDICT = 17, "acts by itself when removed"
SOURCE = "gemma-2-2b/20-gemmascope-res-16k"


@dataclass
class Opened:
    """A page, what it said on its console, and the files that it asked for."""

    page: Any
    folder: Path
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def rows(self) -> list[list[str]]:
        """The text of the table's cells."""
        return self.page.evaluate(
            "[...document.querySelectorAll('tbody tr')].filter(row => row.closest('.latents'))"
            ".map(row => [...row.cells].map(cell => cell.textContent))"
        )


def report(home: Path, *words: str) -> None:
    captured([sys.executable, "-m", "saecli", "--home", home, "report", *words], check=True)


def interesting(latents: dict[str, Any]) -> list[int]:
    """All latents in the table's first order."""
    return np.argsort(-np.array(latents["interest"]), kind="stable").tolist()


def write_reports(folder: Path) -> dict[str, Path]:
    """Write reports: of nasty texts and signed codes, of many latents, and of a crosscoder."""
    home, model = folder / "home", str(save_model(folder / "model"))
    make_text_run(home, model, TopK(k=14))
    report(home, "run", "--out", str(folder / "texts"), "--model", model, "--neuronpedia", SOURCE)
    generator = torch.Generator().manual_seed(0)
    W_enc = torch.randn(D, MANY, generator=generator)
    tensors = (W_enc, torch.zeros(MANY), W_enc.T.clone(), torch.zeros(D))
    many = SAE(*tensors, TopK(k=32), prefixes=(64, MANY))
    run = make_run(home, "many", many, data="texts")
    (run / "effects.json").write_text(json.dumps({"settings": "", "verdicts": {TRIED: VERDICT}}))
    report(home, "many", "--out", str(folder / "many"))
    W = torch.randn(20, 2 * D, generator=generator)
    W[:9, :D] = 0
    for name in "ab":
        make_text_store(home, name, model if name == "a" else "other", layer=3)
    cross = SAE(W.T.clone(), torch.zeros(20), W, torch.zeros(2 * D), Relu(), widths=(D, D))
    saecli.report(cross, folder / "two", ["a", "b"], home=home)
    return {name: folder / name for name in ("texts", "many", "two")}


@contextmanager
def opening(browser: Any, folders: dict[str, Path]) -> Iterator[Callable[..., Opened]]:
    """A function that opens a report, each time in a context of its own; closes all in the end."""
    contexts = []

    def opened(name: str = "texts", at: str = "", **settings: Any) -> Opened:
        contexts.append(browser.new_context(**settings))
        contexts[-1].set_default_timeout(10_000)
        report = Opened(contexts[-1].new_page(), folders[name])
        report.page.on("console", lambda message: report.said.append(message.text))
        report.page.on("pageerror", lambda error: report.said.append(str(error)))
        report.page.on("request", lambda request: report.asked.append(request.url))
        report.page.goto((report.folder / "index.html").as_uri() + at)
        return report

    yield opened
    for context in contexts:
        context.close()
