"""SAEs on the Hugging Face hub: a server on this machine, and the hub's own client."""

import shutil
import socket
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import published
import pytest
import torch
from homes import MLP, make_run, make_store, make_transcoder, random_sae, some_rows, with_origin
from huggingface_hub import HfApi, ModelCard, constants
from model_hub import READER, WRITER, ModelHub, files_of

import saecli
from saecli.sae.activations import JumpRelu, MatchingPursuit, Relu, TopK
from saecli.sae.formats import SavedSAE, load, save
from saecli.sae.hub import Address
from saecli.store.origin import InputEntries, OriginEntries

# The hub's client uploads large files by a call that its own HTTP library has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(autouse=True)
def rows(sae) -> None:
    make_store(sae.home, "rows", some_rows())


def gemma_scope_files(tmp_path: Path) -> dict[str, bytes]:
    """A repository laid out as Gemma Scope's, of JumpReLU SAEs."""
    names = "layer_11/width_16k/average_l0_80 layer_12/width_16k/average_l0_82 "
    names += "layer_12/width_65k/average_l0_72"
    for seed, name in enumerate(names.split()):
        folder = tmp_path / "scope" / name
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "params.npz", **random_sae(JumpRelu(), seed=seed).tensors())
    return files_of(tmp_path / "scope") | {
        "README.md": b"# Gemma Scope",
        "layer_12/notes.txt": b"large" * 1000,
    }


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("a/b", Address("a/b")),
        ("hf://a/b", Address("a/b")),
        ("a/b/c/d-1.5_x", Address("a/b", "c/d-1.5_x")),
        ("a/b@v1", Address("a/b", "", "v1")),
        ("a/b/c@v1", Address("a/b", "c", "v1")),
        ("a/b@v1/c/d", Address("a/b", "c/d", "v1")),
        ("https://hf.co/a/b/tree/refs%2Fpr%2F1/a%20b?x=1", Address("a/b", "a b", "refs/pr/1")),
        ("https://hf.co/a/b?library=sae#readme", Address("a/b")),
        ("http://HuggingFace.co/a/b/tree/refs/pr/1", Address("a/b", "", "refs/pr/1")),
        ("https://hf.co/a/b/resolve/v1/c/layer5.sae.pt", Address("a/b", "c/layer5.sae.pt", "v1")),
        ("https://hf.co/a/b/blob/main/ae.pt/", Address("a/b", "ae.pt", "main")),
        ("a/b@refs/pr/3/c", Address("a/b", "c", "refs/pr/3")),
        ("a/b/c@refs/pr/3", Address("a/b", "c", "refs/pr/3")),
        ("a/b/", Address("a/b")),
        ("https://huggingface.co/a/b", Address("a/b")),
        ("https://huggingface.co/a/b/tree/main", Address("a/b", "", "main")),
        ("https://huggingface.co/a/b/tree/main/c/d", Address("a/b", "c/d", "main")),
        *((text, None) for text in ("a", "", "./a/b", "/a/b", "../a", "~/a", "a/../b")),
        *((text, None) for text in ("a/b/../c", "a/b@", "a b/c")),
    ],
)
def test_addresses(text: str, address: Address | None) -> None:
    assert Address.parse(text) == address


OTHERS = """https://github.com/openai/sparse_autoencoder https://huggingface.co.evil.com/a/b https://huggingface.co:1/a/b
https://huggingface.co@evil.com/a/b https://user:secret@huggingface.co/a/b https://evil.com/huggingface.co/a/b/c
https://huggingface.co/datasets/a/b https://huggingface.co/datasets/a https://huggingface.co/spaces/a/b https://[::1/a/b
https://huggingface.co/a/b/discussions/1 https://huggingface.co/a https://huggingface.co https://huggingface.co/../b
https://xhuggingface.co/a/b https://evil.com?huggingface.co/a/b https://evil.com#@huggingface.co/a/b s3://a/b
https://huggingface.co\\.evil.com/a/b file:///home/a/b ftp://huggingface.co/a/b https:///a/b ://huggingface.co/a/b"""


@pytest.mark.parametrize("url", OTHERS.split())
def test_pages_of_other_hosts_are_not_asked_for_on_the_hub(sae, hub, url):
    done = sae("eval", url).fails(1, "is no page of an SAE on the Hugging Face hub: expected")
    assert not hub.asked and "secret" not in done.err and done.err.count("\n") == 1


def test_pages_of_the_endpoint_are_the_hubs(sae, hub: ModelHub, tmp_path: Path):
    save(SavedSAE(random_sae()), "saelens", tmp_path / "a" / "first")
    hub.add("someone/saes", files_of(tmp_path / "a"))
    done = sae("eval", f"{hub.address}/someone/saes/tree/main/first?x=1", "--json")
    assert done.json["runs"][0]["run"] == "someone/saes/first@main"


def test_files_are_fetched_of_the_commit_that_was_listed(hub, tmp_path, monkeypatch):
    first = random_sae()
    save(SavedSAE(first), "saelens", tmp_path / "old")
    save(SavedSAE(random_sae(seed=1)), "dictionary-learning", tmp_path / "new")
    repo, ask = hub.add("someone/saes", files_of(tmp_path / "old")), HfApi.model_info

    def ask_before_a_push(*args, **settings):
        info = ask(*args, **settings)
        repo.commit(files_of(tmp_path / "new"))
        return info

    monkeypatch.setattr(HfApi, "model_info", ask_before_a_push)
    assert torch.equal(saecli.load_sae("someone/saes").W_enc, first.W_enc)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "form", "files"),
    [
        (Relu(), "auto", ["cfg.json", "sae_weights.safetensors"]),
        (MatchingPursuit(k=4), "auto", ["sae.safetensors"]),
        (JumpRelu(), "saelens", ["cfg.json", "sae_weights.safetensors"]),
        (Relu(), "dictionary-learning", ["ae.pt", "config.json"]),
    ],
)
def test_a_pushed_sae_is_fetched_and_measured_alike(sae, hub, tmp_path, activation, form, files):
    make_run(sae.home, "run", random_sae(activation))
    pushed = sae("push", "run", "someone/saes", "--format", form, "--json")
    assert pushed.json["files"] == files
    own = [f"run/{name}" for name in ("README.md", *files)]
    assert hub.repos["someone/saes"].files.keys() == {"README.md", *own}
    done = sae("eval", "run", "someone/saes/run", "hf://someone/saes", "--json")
    here, *fetched = done.json["runs"]
    assert [measures["run"] for measures in fetched] == ["someone/saes/run"] * 2
    for measures in (*fetched, pushed.json["measures"]):
        for key in ("rows", "fvu", "l0"):
            assert measures[key] == pytest.approx(here[key], rel=1e-4)
    written = [
        *files_of(tmp_path).values(),
        *hub.repos["someone/saes"].files.values(),
        (pushed.out + pushed.err + done.out + done.err).encode(),
    ]
    assert not any(WRITER.encode() in content for content in written)


@pytest.mark.slow
def test_each_sae_has_a_card_and_that_of_the_repository_is_the_first_ones_or_the_users(sae, hub):
    for name, seed in (("one", 0), ("two", 1)):
        make_run(sae.home, name, random_sae(seed=seed))
        assert sae("push", name, "someone/saes", "--private").status == 0
    repo = hub.repos["someone/saes"]
    assert repo.private
    assert repo.files["README.md"] == repo.files["one/README.md"]
    card = ModelCard(repo.files["two/README.md"].decode())
    assert (card.data.library_name, card.data.base_model) == ("saelens", "gpt2")
    assert "sparse-autoencoder" in card.data.tags
    measures = sae("eval", "two", "--json").json["runs"][0]
    (row,) = [line for line in card.text.splitlines() if line.startswith("| gpt2, layer 3 ")]
    assert "resid_post | relu | 8 | 20 |" in row and f"| {measures['fvu']:.4g} |" in row
    for line in (
        'sae_lens.SAE.from_pretrained("someone/saes", "two")',
        "sae eval someone/saes/two --data STORE",
        'saecli.load_sae("someone/saes/two")',
    ):
        assert line in card.text.splitlines()
    repo.files["README.md"] = b"All mine."
    assert sae("push", "one", "someone/saes").status == 0
    assert repo.files["README.md"] == b"All mine."


EVERYWHERE = "/home/me/models/llama"


def everywhere(kind: object) -> Any:
    """A value of an annotation with a path in every place that takes a string."""
    if get_origin(kind) in (Union, UnionType):
        return everywhere(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return [everywhere(get_args(kind)[0])] * 2
    if kind is InputEntries:
        return {"model": EVERYWHERE, "revision": EVERYWHERE, "site": "mlp_in", "layer": 3}
    assert kind in (int, str, bool, float)
    return {int: 3, bool: True, float: 0.5, str: EVERYWHERE}[kind]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["push", "export"])
@pytest.mark.parametrize("form", ["saelens", "native"])
def test_no_path_of_this_machine_is_in_a_written_byte(sae, hub, tmp_path, form, command):
    kinds = get_type_hints(OriginEntries).items()
    origin = {name: everywhere(kind) for name, kind in kinds if not name.startswith("target")}
    origin["site"] = "resid_post"
    if form == "saelens":  # which would take them for a crosscoder's
        del origin["inputs"]
    make_run(sae.home, "run", random_sae(), origin=origin)
    if command == "export":
        sae("export", "run", "--to", form, "--out", tmp_path / "out").succeeds()
        files = files_of(tmp_path / "out")
        assert files and not any(b"/home/me" in content for content in files.values())
        return
    sae("push", "run", "someone/saes", "--format", form).succeeds()
    files = hub.repos["someone/saes"].files
    assert not any(b"/home/me" in content for content in files.values())
    site = "resid_post" if form == "saelens" else "mlp_in"
    assert f"llama, layer 3 {site}" in files["README.md"].decode()
    assert ModelCard(files["README.md"].decode()).data.base_model is None


@pytest.mark.slow
def test_a_signed_topk_is_native_unless_saelens_is_asked_for(sae, hub: ModelHub):
    make_run(sae.home, "run", random_sae(TopK(k=4)))
    done = sae("push", "run", "someone/saes", "--json")
    assert done.json["format"] == "native" and "--format saelens writes it clipped" in done.err
    done = sae("push", "run", "someone/saes", "--format", "saelens", "--json")
    assert done.json["written_as"] == "relu-topk" and "negative codes become 0" in done.err
    files = hub.repos["someone/saes"].files
    own = {name.removeprefix("run/") for name in files if name.startswith("run/")}
    assert own == {"README.md", "cfg.json", "sae_weights.safetensors"}  # native's are gone


@pytest.mark.slow
def test_circuit_tracer_layers_share_a_folder_without_other_formats(sae, hub):
    for layer in (0, 1):
        shutil.rmtree(sae.home / "activations")
        origin = MLP | {"layer": layer, "target_layer": layer}
        make_transcoder(sae.home, f"layer-{layer}", random_sae(), origin)
    assert sae("push", "layer-0", "someone/saes/set", "--json").json["format"] == "saelens"
    for layer in (0, 1):
        assert sae(f"push layer-{layer} someone/saes/set --format circuit-tracer").status == 0
    files = hub.repos["someone/saes"].files
    own = {name.removeprefix("set/") for name in files if name.startswith("set/")}
    assert own == {"README.md", "config.yaml", "layer_0.safetensors", "layer_1.safetensors"}
    card = files["set/README.md"].decode()
    assert "sae eval someone/saes/set --data STORE --target STORE" in card
    assert 'load_transcoder_from_hub("someone/saes/set")' in card
    assert "gpt2, layer 1 mlp_in -> layer 1 mlp_out" in card
    assert sae("eval someone/saes/set/layer_1.safetensors --data x --target y").status == 0
    assert sae("eval", "someone/saes/set", "--data", "x", "--target", "y").status == 1  # two layers


@pytest.mark.slow
def test_only_the_files_of_the_sae_asked_for_are_fetched_and_once(sae, hub, tmp_path):
    first = hub.add("google/gemma-scope-2b-pt-res", gemma_scope_files(tmp_path))
    address = "google/gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82"
    for _ in range(2):
        (measures,) = sae("eval", address, "--json").json["runs"]
    assert measures["run"] == address
    # Where the hub sends for params.npz.
    assert len([path for path in hub.asked if path.startswith("GET /lfs/")]) == 1
    assert hub.downloads() == []
    assert sae("export", address, "--to", "saelens", "--out", tmp_path / "out").status == 0
    x, original = torch.from_numpy(some_rows(50)), random_sae(JumpRelu(), seed=1)
    torch.testing.assert_close(load(tmp_path / "out").sae(x), original(x), atol=1e-4, rtol=1e-5)
    old, other = first.head, first.files["layer_11/width_16k/average_l0_80/params.npz"]
    first.commit(first.files | {"layer_12/width_16k/average_l0_82/params.npz": other})
    new, before = sae("eval", address, f"{address}@{old}", "--json").json["runs"]
    assert before | {"run": address} == measures != new


SCOPES = {  # places, the files fetched from each, and the folder or file as published
    "google/gemma-scope-2-4b-pt/transcoder/layer_17_width_16k_l0_big_affine": (
        ["config.json", "params.safetensors"],
        lambda folder: published.gemma_scope_2(folder, "transcoder", True),
    ),
    "google/gemma-scope-2-270m-pt/crosscoder/layer_5_9_12_width_65k_l0_medium": (
        ["config.json", *(f"params_layer_{place}.safetensors" for place in range(3))],
        published.gemma_scope_2_crosscoder,
    ),
    "someone/checkpoints/5000": (
        ["activation_scaler.json", "cfg.json", "sae_weights.safetensors"],
        lambda folder: published.saelens_checkpoint(folder, factor=0.4),
    ),
    "OpenMOSS-Team/Llama3_1-8B-Base-LXR-8x/Llama3_1-8B-Base-L15R-8x": (
        ["checkpoints/final.safetensors", "hyperparams.json"],
        published.llama_scope,
    ),
    "Qwen/SAE-Res-Qwen3-8B-Base-W64K-L0_4": (["layer5.sae.pt"], published.qwen_scope),
    "Qwen/SAE-Res-Qwen3-8B-Base-W64K-L0_4/layer5.sae.pt": (["layer5.sae.pt"], published.qwen_scope),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", SCOPES)
def test_only_one_saes_files_of_a_suite_are_fetched(sae, hub, tmp_path, monkeypatch, place):
    address, (files, write) = Address.parse(place), SCOPES[place]
    inner = "." if address.folder.endswith(".pt") else address.folder
    expected = write(tmp_path / "there" / inner)
    others = {"README.md": b"", f"{address.folder}-notes": b""}
    if address.repo != place:
        others |= {"layer6.sae.pt": b"large", "other/config.json": b"{}"}
    hub.add(address.repo, files_of(tmp_path / "there") | others)
    published.assert_reads(saecli.load_sae(place), expected)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    with pytest.warns(UserWarning, match="is taken from the cache"):
        published.assert_reads(saecli.load_sae(place), expected)
    (snapshot,) = (tmp_path / "cache").glob("*/snapshots/*")
    assert sorted(files_of(snapshot)) == [str(Path(inner, name)) for name in files]


def test_of_several_layers_on_the_hub_one_must_be_named(sae, hub, tmp_path):
    for layer in (5, 11):
        published.qwen_scope(tmp_path / "there", layer)
    repo = "Qwen/SAE-Res-Qwen3-8B-Base-W64K-L0_4"
    hub.add(repo, files_of(tmp_path / "there"))
    sae("eval", repo).fails(1, f"{repo} holds 2 SAEs: name one of them, {repo}/layer11")
    for layer in (11, 5):  # the second with the first in the cache
        fetched = saecli.load_sae(f"{repo}/layer{layer}.sae.pt")
        published.assert_reads(fetched, published.qwen_scope(tmp_path / "again", layer))


def test_a_folder_here_wins(sae, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(SavedSAE(random_sae()), "saelens", Path("someone/saes/first"))
    hub.add("someone/saes", files_of(Path("someone/saes")))
    done = sae("eval", "someone/saes/first", "--json")
    assert done.json["runs"][0]["run"] == "someone/saes/first" and not hub.asked
    assert sae("eval", "hf://someone/saes/first").status == 0 and hub.asked


PUSH, EVAL = ["push", "run"], ["eval"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "token", "said", "status"),
    [
        ([*EVAL, "someone/none"], WRITER, "no model repository someone/none, or it is private", 1),
        ([*EVAL, "someone/none"], "", "no model repository someone/none, or it is private", 1),
        ([*EVAL, "someone/secret/a"], "", "no model repository someone/secret", 1),
        ([*EVAL, "google/gated/a"], READER, "google/gated is gated", 1),
        ([*EVAL, "other/saes@v2"], "", "other/saes@v2", 1),
        ([*EVAL, "other/saes"], "hf_wrong", "hf auth login", 1),
        ([*EVAL, "run/s"], "", "no run and no folder here is named 'run/s'", 1),
        ([*EVAL, "google/scope"], "", "google/scope/layer_11/width_16k/average_l0_80, ", 1),
        ([*EVAL, "google/scope/layer_12"], "", "holds 2 SAEs", 1),
        ([*EVAL, "google/scope/layer_13"], "", "no SAE found in google/scope/layer_13", 1),
        ([*PUSH, "someone/new"], "", "hf auth login", 1),
        ([*PUSH, "someone/new"], READER, "the token may only read", 1),
        ([*PUSH, "someone/new"], "hf_wrong", "hf auth login", 1),
        ([*PUSH, "other/new"], WRITER, "the right", 1),
        ([*PUSH, "other/saes"], WRITER, "the right", 1),
        ([*PUSH, "someone/public", "--private"], WRITER, "--private", 2),
        ([*PUSH, "nonsense"], WRITER, "USER/REPO", 2),
        ([*PUSH, "someone/saes@v1"], WRITER, "USER/REPO", 2),
        ([*PUSH, "someone/saes", "--format", "sparsify"], WRITER, "sparsify cannot express", 1),
    ],
)
def test_a_refusal_changes_nothing(sae, hub, tmp_path, monkeypatch, words, token, said, status):
    make_run(sae.home, "run", random_sae(JumpRelu()))
    save(SavedSAE(random_sae()), "saelens", tmp_path / "a" / "a")
    files = files_of(tmp_path / "a")
    hub.add("someone/secret", files, private=True)
    hub.add("google/gated", files, gated=True)
    hub.add("other/saes", files, owner="other")
    hub.add("someone/public", files)
    hub.add("google/scope", gemma_scope_files(tmp_path))
    before = {name: repo.files for name, repo in hub.repos.items()}
    monkeypatch.setenv("HF_TOKEN", token)
    done = sae(*words)
    assert (done.status, done.out, len(done.err.splitlines())) == (status, "", 1), done.err
    assert said in done.err
    assert {name: repo.files for name, repo in hub.repos.items()} == before


def test_without_a_network_fetched_files_are_taken_from_the_cache(sae, hub, tmp_path, monkeypatch):
    save(SavedSAE(random_sae()), "saelens", tmp_path / "a" / "first")
    repo = hub.add("someone/saes", files_of(tmp_path / "a"))
    online = sae("eval", "someone/saes", "--json")
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and never answers
    addresses = ("http://hub.invalid", f"http://127.0.0.1:{silent.getsockname()[1]}")
    for address in addresses:
        with monkeypatch.context() as patched:
            patched.setattr(constants, "ENDPOINT", address)
            patched.setattr("saecli.base.machine.ANSWER_SECONDS", 0.3)
            offline = sae("eval", "someone/saes", "--json")
            assert offline.json == online.json
            said = f"someone/saes/first is taken from the cache, as of {repo.head}"
            assert said in offline.err
            with pytest.warns(UserWarning, match=said):
                saecli.load_sae("someone/saes")
            assert "cannot be reached" in sae("push", "someone/saes", "someone/copy").err
            said = "the Hugging Face hub cannot be reached for some/other"
            assert said in sae("eval", "some/other").err
    silent.close()
    for name, said in (("someone/saes", "from the cache"), ("some/other", "cannot be reached")):
        hub.failing = [503] * 9
        assert said in sae("eval", name).err


def test_a_transcoders_folder_is_pushed_with_its_targets_named(sae, hub, tmp_path):
    transcoder = random_sae(TopK(k=4))
    make_transcoder(sae.home, "run", transcoder)
    save(with_origin(transcoder, MLP), "native", tmp_path / "copy")
    words = ("push", tmp_path / "copy", "someone/saes", "--data", "x")
    sae(*words).fails(2, "by --data and --target")
    assert sae(*words, "--target", "y", "--json").json["format"] == "native"
