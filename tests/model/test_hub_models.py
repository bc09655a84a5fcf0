"""Language models of a hub on this machine: online, from the cache, at a revision, gated, and hubs that are silent."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import probe_sets
import pytest
from homes import CommandLine
from model_hub import ModelHub, files_of
from tiny_models import save_model

from saecli import load_sae
from saecli.base import machine
from saecli.base.errors import ConfigError, ModelError
from saecli.model import source as model_source
from saecli.model.source import find_model

MODEL = "some/llama"
TEXT = "\n\n".join("abcdefghijk" * (1 + number % 7) for number in range(60))
EXTRACT = ("extract", "--model", MODEL, "--rows", "300", "--layer", "1")


@pytest.fixture
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = save_model(tmp_path_factory.mktemp("llama"), "llama")
    return files_of(folder) | {"README.md": b"# One", "pytorch_model.bin": b"of old times"}


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """Takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield listening


@pytest.fixture
def silent(listening: socket.socket) -> str:
    """The address of a hub that never answers."""
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def offline(monkeypatch: pytest.MonkeyPatch, how: str, silent: str) -> None:
    """Cut this process off from the hub: by the switch, by a name without an address, by silence."""
    if how == "switch":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        address = "http://hub.invalid" if how == "name" else silent
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr(machine, "ANSWER_SECONDS", 0.5)


def described(home: Path, store: str) -> dict[str, Any]:
    return json.loads((home / "activations" / store / "store.json").read_text())


@pytest.mark.parametrize("how", ["switch", "name", "silence"])
def test_offline_it_is_the_same_request(sae: CommandLine, hub: ModelHub, files, text, silent, how):
    repo = hub.add(MODEL, files)
    assert sae(*EXTRACT, "--dataset", text, "--name", "one").status == 0
    store = described(sae.home, "one")
    assert store["source"]["model"] == MODEL
    assert store["source"]["revision"] == store["source"]["weights"] == repo.head
    assert "pytorch_model.bin" not in hub.downloads()
    offline(sae.monkeypatch, how, silent)
    assert sae(*EXTRACT, "--dataset", text, "--name", "one").status == 0  # done already
    # Runs the model.
    assert sae(*EXTRACT, "--dataset", text, "--name", "two", "--context", "16").status == 0
    assert described(sae.home, "one") == store
    assert described(sae.home, "two")["source"]["weights"] == store["source"]["weights"]


def test_revisions_are_branches_tags_and_commits(hub: ModelHub, files, monkeypatch):
    repo = hub.add(MODEL, files)
    early = repo.head
    repo.refs["step1"] = early
    repo.commit(files | {"model.safetensors": files["model.safetensors"] + b" "})
    assert find_model(MODEL).revision == repo.head
    assert find_model(MODEL, "step1").revision == find_model(f"{MODEL}@step1").revision == early
    assert find_model(f"{MODEL}@step1", "step1").revision == early
    with pytest.raises(ConfigError, match=r"--model names step1 of .*, and --model-revision main"):
        find_model(f"{MODEL}@step1", "main")
    assert find_model(MODEL, early).identity() == find_model(MODEL, "step1").identity()
    assert find_model(MODEL).identity() != find_model(MODEL, "step1").identity()
    with pytest.raises(ModelError, match=f"{MODEL}@step2 is no branch, tag or commit"):
        find_model(MODEL, "step2")
    with pytest.raises(ModelError, match=f"{MODEL}@{'0' * 40} is no branch, tag"):
        find_model(MODEL, "0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find_model(MODEL, "step1").revision == early
    with pytest.raises(ModelError, match=f"{MODEL}@step2 is not on this machine"):
        find_model(MODEL, "step2")


def test_a_revision_of_what_is_not_on_the_hub_is_refused(tmp_path: Path):
    for name in ("tiny-gemma2", str(save_model(tmp_path, "gpt2"))):
        for arguments in ((name, "main"), (f"{name}@main",)):
            with pytest.raises(ConfigError, match="revision does nothing with"):
                find_model(*arguments)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gated": True}, f"{MODEL} is gated: accept its licence at http"),
        ({"private": True}, f"has no model repository {MODEL}, or it is private"),
    ],
)
def test_a_model_not_for_everyone_is_refused(hub: ModelHub, files, monkeypatch, settings, sentence):
    hub.add(MODEL, files, **settings)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ModelError, match=sentence):
        find_model(MODEL)


def test_a_silent_hub_is_asked_once_and_not_for_long(hub: ModelHub, listening, silent, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", silent)
    monkeypatch.setattr(machine, "ANSWER_SECONDS", 0.3)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"reached \(no (answer|connection).* 127.0.0.1"):
            find_model(MODEL)
    listening.settimeout(0)
    requests = 0
    with pytest.raises(BlockingIOError):
        while True:
            connection, _ = listening.accept()
            with connection:
                requests += b"HEAD" in connection.recv(1000)
    assert requests == 1


def test_a_folder_is_what_its_weights_and_tokenizer_hold(tmp_path: Path):
    folder = save_model(tmp_path / "model", "gpt2")
    first = find_model(str(folder)).content
    (folder / "README.md").write_text("A model.")
    (folder / "model.safetensors").touch()
    copied = shutil.copytree(folder, tmp_path / "copied", copy_function=shutil.copyfile)
    assert find_model(str(folder)).content == find_model(str(copied)).content == first
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")
        assert find_model(str(folder)).content != first
        shutil.copyfile(copied / name, folder / name)


def test_a_large_file_is_read_again_only_once_it_changes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(model_source, "LARGE", 0)
    monkeypatch.setattr(model_source, "HF_HOME", str(tmp_path / "home"))
    folder = save_model(tmp_path / "model", "gpt2")
    first = find_model(str(folder)).content
    kept = [*(tmp_path / "home" / "saecli").iterdir()]
    assert find_model(str(folder)).content == first and len(kept) > 2
    for file in kept:
        file.write_text("another")
    assert find_model(str(folder)).content != first
    for file in folder.iterdir():
        file.touch()
    assert find_model(str(folder)).content == first
    monkeypatch.setattr(model_source, "HF_HOME", "/dev/null")
    assert find_model(str(folder)).content == first


# Commands that take a model, on a run of a store of that model.
COMMANDS = {
    "eval": ("--model", MODEL, "--tokens", "200"),
    "refit": ("--model", MODEL, "--tokens", "200"),
    "controls": ("--model", MODEL, "--tokens", "200"),
    "finetune": ("--tokens", "200"),
    "steer": ("--latent", "1", "--scale", "8", "--prompt", "abc", "--max-new-tokens", "3"),
    "read": ("--prompt", "abc"),
    "probe": ("--rows", "40", "--k", "2"),
    "report": ("--model", MODEL, "--out"),
}


TRAINED = ("--d-sae", "32", "--act", "topk", "--k", "4")


def trained(sae: CommandLine, text: Path, *revision: str) -> None:
    sae(*EXTRACT, "--dataset", text, "--name", "rows", *revision).succeeds()
    sae("train", "--name", "run", *TRAINED, "--solver", "sgd", "--epochs", "1").succeeds()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # by the hub's client
def test_commands_read_the_recorded_commit(sae: CommandLine, hub: ModelHub, files, text, tmp_path):
    repo = hub.add(MODEL, files)
    repo.refs["step1"] = early = repo.head
    repo.commit({})  # of which the cache knows nothing
    trained(sae, text, "--model-revision", "step1")
    assert load_sae(sae.home / "runs" / "run").metadata["revision"] == early
    sae("push", "run", "someone/saes", "--model", MODEL, "--tokens", "200").succeeds()
    sae.monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    lines = [(f"{'fgh' * (1 + at % 9)}{'ab'[at % 2]}", str(at % 2)) for at in range(60)]
    probe_sets.install(tmp_path / "site", {"5_last_letter": lines}, sae.monkeypatch)
    for command, words in COMMANDS.items():
        out = [str(tmp_path / "pages")] if command == "report" else []
        done = sae(command, "run", *words, *out, "--json").succeeds()
        assert "came from" not in done.err and "was trained on" not in done.err, (command, done.err)
    rows = ("--layer", "1", "--rows", "400", "--dataset", text)
    sae("train", "--model", MODEL, "--model-revision", "step1", *rows, *TRAINED).succeeds()


@pytest.mark.slow
def test_a_revision_not_recorded_is_said(sae: CommandLine, hub: ModelHub, files, text, tmp_path):
    repo = hub.add(MODEL, files)
    repo.refs["step1"] = early = repo.head
    trained(sae, text, "--model-revision", "step1")
    late = repo.commit(files | {"model.safetensors": other_weights(tmp_path)})
    same = sae("eval", "run", "--model", MODEL, "--json")
    other = sae("eval", "run", "--model", f"{MODEL}@main", "--json")
    assert f"came from {MODEL}@{early}, and is run through {MODEL}@{late}" in other.err
    kept, moved = (json.loads(done.out)["runs"][0]["ce_clean"] for done in (same, other))
    assert abs(kept - moved) > 1e-3
    steered = sae("steer", "run", *COMMANDS["steer"], "--model", f"{MODEL}@main")
    assert f"{MODEL}@{early}, and is used in {MODEL}@{late}" in steered.err


@pytest.mark.slow
def test_two_checkpoints_are_two_models(sae: CommandLine, hub: ModelHub, files, text, tmp_path):
    repo = hub.add(MODEL, files)
    repo.refs["step1"] = early = repo.head
    late = repo.commit(files | {"model.safetensors": other_weights(tmp_path)})
    rest = ("--layer", "1", "--dataset", text, "--rows", "300", "--name", "s")
    both = ("--model", f"{MODEL}@step1", "--model", f"{MODEL}@main")
    sae("extract", *both, *rest).succeeds()
    names = [f"s-llama-{number}-l1-resid_post" for number in (0, 1)]
    assert [described(sae.home, name)["source"]["revision"] for name in names] == [early, late]
    data = [word for name in names for word in ("--data", name)]
    sae("train", *data, "--name", "run", *TRAINED, "--epochs", "1").succeeds()
    done = sae("eval", "run", *both, "--tokens", "200", "--json")
    places = json.loads(done.out)["runs"][0]["hook_points"]
    assert [place["model"] for place in places] == [f"{MODEL}@{early}", f"{MODEL}@{late}"]
    assert places[0]["ce_clean"] != places[1]["ce_clean"]


def other_weights(folder: Path) -> bytes:
    """Weights of the same shape as the model's, each by a third larger."""
    from safetensors.torch import load_file, save

    tensors = load_file(save_model(folder / "other", "llama") / "model.safetensors")
    return save({name: tensor * 4 / 3 for name, tensor in tensors.items()}, {"format": "pt"})
