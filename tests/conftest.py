"""Fixtures that many tests share."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before torch is imported: threads that wait sleep (see saecli/__init__.py), tests that run side by side have one
# thread each, since threads that wait for cores would take longer, and processes that a test starts have as many as its
# own: results agree bit for bit between equal numbers of threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else str(os.cpu_count())
)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # `tests/cuda/run.sh` is for a GPU

from homes import CommandLine
from store_producer import Producer

settings.register_profile("quick", max_examples=10, deadline=None)
settings.register_profile("thorough", max_examples=40, deadline=None)  # by --hypothesis-profile
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Small texts may end before the rows that are asked for."""
    config.addinivalue_line("filterwarnings", "ignore:the text ended after")
    config.addinivalue_line("filterwarnings", "ignore:.* ends after .* rows; others go on")


@pytest.fixture
def sae(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    """The command line, run in this process, in a home of the test's own; training draws no curves, which is slow."""
    monkeypatch.delenv("COLUMNS", raising=False)  # which pytest-xdist sets
    monkeypatch.setattr("saecli.show.pictures.draw_losses", lambda path, name, lines: path.touch())
    return CommandLine(tmp_path / "home", monkeypatch, capsys)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The only hub that the client knows, with an empty cache, and a token that may write."""
    from huggingface_hub import constants
    from model_hub import WRITER, serving  # take a while to import

    with serving() as served:
        template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in (
            ("ENDPOINT", served.address),
            ("HF_HUB_DISABLE_XET", True),
            ("HUGGINGFACE_CO_URL_TEMPLATE", template),
            ("HF_HUB_CACHE", str(tmp_path / "cache")),
            ("HF_TOKEN_PATH", str(tmp_path / "no-token")),
        ):
            monkeypatch.setattr(constants, name, value)
        # transformers keeps a client, of an earlier test's hub.
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        yield served


@pytest.fixture(params=["gemma2", "llama", "gpt2", "gpt-neox"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A random model of each architecture of `tiny_models`, as transformers loads it."""
    from tiny_models import open_model  # imports transformers, which takes seconds

    return open_model(tmp_path, request.param)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved, kept to be looked into."""
    import saecli.show.geometry
    import saecli.show.pictures

    kept: list[Any] = []
    original = saecli.show.pictures.figure

    @contextmanager
    def keeping(*arguments: object) -> Iterator[Any]:
        with original(*arguments) as figure:
            yield figure
            kept.append(figure)

    for name in ("pictures", "geometry"):
        monkeypatch.setattr(sys.modules[f"saecli.show.{name}"], "figure", keeping)
    return kept


@pytest.fixture
def text(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file of the module's `TEXT`."""
    path = tmp_path / "text.txt"
    path.write_text(request.module.TEXT)
    return path


@pytest.fixture(scope="module")
def produce() -> Iterator[Producer]:
    """Writes the store of `store_producer` in processes of their own."""
    producer = Producer()
    yield producer
    producer.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of reports for a browser, by name; see `opened_pages`."""
    from opened_pages import write_reports  # imports transformers, which takes seconds

    return write_reports(tmp_path_factory.mktemp("reports"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    from opened_pages import open_browser

    with open_browser() as opened:
        yield opened


@pytest.fixture
def open_page(browser: Any, folders: dict[str, Path]) -> Iterator[Any]:
    """Opens a report in the browser; see `opened_pages.opening`."""
    from opened_pages import opening

    with opening(browser, folders) as opened:
        yield opened
