"""Releases in SAELens' registry: the formats that only they need, and their names; and finding the SAE that is
meant."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import published
import pytest
import torch
import yaml
from homes import load, make_run, make_store, random_sae
from huggingface_hub import constants
from launching import captured, python_with
from model_hub import files_of
from published import ROWS, D, K, Published

import saecli
from saecli.base.console import Silent
from saecli.base.errors import FormatError, RunError
from saecli.base.home import Home
from saecli.sae.activations import ReluTopK
from saecli.sae.formats import SavedSAE, save
from saecli.sae.hub import Address
from saecli.sae.library import Subject, find_subject, lasting_name, registered

X = torch.from_numpy(ROWS).float()
SCOPE, SCOPE_2 = published.gemma_scope, published.gemma_scope_2
LLAMA, LEARNING = published.llama_scope, published.dictionary_learning
GEMMA = "google/gemma"
SCALED = "mlp-out/sae_group_gpt2_blocks.8.hook_mlp_out_24576:v1"


def scaled(folder: Path) -> Published:
    return published.saelens_5(
        folder,
        factor=0.4,
        normalize_activations=True,
        hook_point="blocks.8.hook_mlp_out",
        model_name="gpt2-small",
    )


def unconfigured(folder: Path) -> Published:
    expected = SCOPE_2(folder, *(("transcoder", True) if "transcoder" in str(folder) else ()))
    (folder / "config.json").unlink()
    return expected


TRANSCODER = partial(SCOPE_2, kind="transcoder", affine=True, model_name="gemma-v3-270m-pt")
R1 = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
FACTORS = {"llama": np.sqrt(D) / 12.5, "r1": np.sqrt(D) / 12.5, "saelens": 0.4}  # of rows
IN_CACHE = "models--google--gemma-scope-9b-it-mlp/snapshots/0b"
OF_12, OF_17 = "layer_12/width_16k/average_l0_82", "layer_17_width_16k_l0_big"
SCOPE_2B, SCOPE_4B, SCOPE_270M = (f"gemma-scope-{size}-pt" for size in ("2b", "2-4b", "2-270m"))
GEMMA_2B, GEMMA_4B, GEMMA_270M = (f"{GEMMA}-{size}" for size in ("2-2b", "3-4b-pt", "3-270m"))
META, INSTRUCT, LARGE = "meta-llama/", "Llama-3.1-8B-Instruct", "Llama-3.3-70B-Instruct"
BASE, DISTILLED = "Llama3_1-8B-Base", "DeepSeek-R1-Distill-Llama-8B"
R1_SCOPE, ATTENTION = "Llama-Scope-R1-Distill/400M", "gpt2-small_L0_Hcat_z_lr1.20e-03_l11.80e+00_v9"
QWEN, QWEN_14B = "SAE-Res-Qwen3-8B-Base-W64K-L0_4/layer5.sae.pt", "qwen3-14b-transcoders"
EMBEDDING = partial(SCOPE, factor=1 / np.sqrt(D))
UNIT, UNIT_R1 = (partial(LLAMA, r1=r1, unit_norms=True) for r1 in (False, True))
GOODFIRE, DEEPSEEK = published.goodfire, partial(published.goodfire, part="")
HEADS, TRANSCODER_14B = published.attention_heads, published.qwen_transcoder
LEARNED = "AutoEncoder AutoEncoderTopK BatchTopKSAE MatryoshkaBatchTopKSAE JumpReluAutoEncoder"
NORM_TO_MLP, MLP = "ln2.hook_normalized mlp_out", "mlp_in mlp_out"


def qwen(path: Path) -> Published:
    return published.qwen_scope(path.parent)


# By place; the converter, if SAELens' does the same.
FILES: dict[str, tuple[str, Callable[[Path], Published], str]] = {
    f"{SCOPE_2B}-res/{OF_12}": ("gemma2", SCOPE, f"{GEMMA_2B} 12 resid_post"),
    f"{IN_CACHE}/{OF_12}": ("", SCOPE, f"{GEMMA}-2-9b-it 12 mlp_out"),
    f"{SCOPE_2B}-att/{OF_12}": ("gemma2-att", SCOPE, f"{GEMMA_2B} 12 attn_z"),
    f"{SCOPE_2B}-res/embedding/width_4k/l0_6": ("", EMBEDDING, f"{GEMMA_2B} 0 resid_pre"),
    f"{SCOPE_2B}-transcoders/{OF_12}": ("gemma2transcoder", SCOPE, f"{GEMMA_2B} 12 {NORM_TO_MLP}"),
    f"{SCOPE_4B}/resid_post/{OF_17}": ("gemma", SCOPE_2, f"{GEMMA_4B} 17 resid_post"),
    f"{SCOPE_270M}/transcoder/{OF_17}_affine": ("transcoder", TRANSCODER, f"{GEMMA_270M} 17 {MLP}"),
    f"{SCOPE_4B}/mlp_out_all/{OF_17}": ("gemma-bare", unconfigured, f"{GEMMA_4B} 17 mlp_out"),
    f"{SCOPE_4B}/transcoder_all/{OF_17}_affine": (
        "transcoder-bare",
        unconfigured,
        f"{GEMMA_4B} 17 {MLP}",
    ),
    f"{BASE}-LXR-8x/{BASE}-L15R-8x": ("llama", UNIT, f"{META}Llama-3.1-8B 15 resid_post"),
    f"{R1_SCOPE}/L15R": ("r1", UNIT_R1, f"{R1} 15 resid_post"),
    f"{R1_SCOPE}/L15T": ("", partial(LLAMA, r1=True, transcodes=True), f"{R1} 15 {NORM_TO_MLP}"),
    QWEN: ("qwen", qwen, "Qwen/Qwen3-8B-Base 5 resid_post"),
    f"{INSTRUCT}-SAE-l19/{INSTRUCT}-SAE-l19.pth": (
        "goodfire",
        GOODFIRE,
        f"{META}{INSTRUCT} 19 resid_post",
    ),
    f"{LARGE}-SAE-l50/{LARGE}-SAE-l50.pt": (
        "goodfire-large",
        GOODFIRE,
        f"{META}{LARGE} 50 resid_post",
    ),
    f"{DISTILLED}-SAE-l19/{DISTILLED}-SAE-l19.pt": ("deepseek", DEEPSEEK, f"{R1} 19 resid_post"),
    f"attn-saes/{ATTENTION}.pt": ("attention", HEADS, "gpt2 0 attn.hook_z"),
    f"{QWEN_14B}/layer_5.safetensors": ("mwhanna", TRANSCODER_14B, f"Qwen/Qwen3-14B 5 {MLP}"),
    **{
        f"lm_sae/{name}/trainer_0": (
            f"learning-{name}",
            partial(LEARNING, name=name, old=True),
            "gpt2 8 resid_post",
        )
        for name in (*LEARNED.split(), "GatedAutoEncoder")
    },
    SCALED: ("saelens", scaled, "gpt2 8 mlp_out"),
}


@pytest.mark.parametrize("place", FILES)
def test_a_release_is_read_by_its_formula(tmp_path: Path, place: str) -> None:
    name, write, where = FILES[place]
    expected = write(tmp_path / place)
    saved = load(tmp_path / place, FACTORS.get(name))
    model, layer, *sites = where.split()
    origin = {"model": model, "layer": int(layer)}
    origin |= dict(zip(("site", "target_site"), sites, strict=False))
    origin |= {"target_layer": int(layer)} if len(sites) == 2 else {}
    assert saved.origin.to_json() == origin and saved.is_transcoder == (len(sites) == 2)
    published.assert_reads(saved.sae, expected)


@pytest.mark.slow
def test_saelens_makes_the_same_of_releases(tmp_path: Path) -> None:
    names = {place: name for place, (name, _, _) in FILES.items() if name}
    for place in names:
        FILES[place][1](tmp_path / place)
    np.save(tmp_path / "rows.npy", X.numpy())
    words = [f"{name}={place}={FACTORS.get(name, 1)}" for place, name in names.items()]
    script = Path(__file__).parents[1] / "libraries/saelens.py"
    captured([python_with("saelens"), script, "scopes", tmp_path, *words], check=True)
    for place, name in names.items():
        sae = load(tmp_path / place, FACTORS.get(name)).sae
        if name == "qwen":  # SAELens makes negative codes 0
            sae = sae.changed(activation=ReluTopK(k=K))
        with np.load(tmp_path / f"{name}.npz") as theirs:
            np.testing.assert_allclose(sae.encode(X), theirs["codes"], rtol=1e-4, atol=2e-5)
            error = np.abs(sae(X).numpy() - theirs["x_hat"]).max()
            assert error < 1e-5 * np.abs(theirs["x_hat"]).max()


def install(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of SAELens' name, whose code must not run, with a registry."""
    (folder / "sae_lens").mkdir(parents=True)
    (folder / "sae_lens" / "__init__.py").write_text("raise RuntimeError")
    (folder / "sae_lens" / "pretrained_saes.yaml").write_text(text)
    monkeypatch.syspath_prepend(folder)


RELEASES = {
    "scope-canonical": {
        "conversion_func": "gemma_2",
        "repo_id": "google/gemma-scope-2b-pt-res",
        "model": "gemma-2-2b",
        "saes": [{"id": "layer_12/canonical", "path": "layer_12/width_16k/average_l0_82"}],
    },
    "mlp-tm": {
        "repo_id": "tm/mlp-out",
        "model": "gpt2-small",
        "config_overrides": {"model_from_pretrained_kwargs": {"center_writing_weights": True}},
        "saes": [
            {"id": "blocks.8.hook_mlp_out", "path": Path(SCALED).name, "norm_scaling_factor": 0.4}
        ],
    },
    "wg": {
        "repo_id": "a/b",
        "config_overrides": {"normalize_activations": "constant_norm_rescale"},
        "saes": [{"id": "layer_8", "path": "layer_8"}],
    },
}


def test_an_sae_is_named_by_its_release_and_id(sae, hub, tmp_path, monkeypatch):
    install(tmp_path / "packages", yaml.safe_dump(RELEASES), monkeypatch)
    make_store(sae.home, "rows", ROWS.astype(np.float32))
    place, name = "layer_12/width_16k/average_l0_82", "scope-canonical/layer_12/canonical"
    published.gemma_scope(tmp_path / "scope" / place)
    files = files_of(tmp_path / "scope") | {"layer_12/other/params.npz": b""}
    hub.add("google/gemma-scope-2b-pt-res", files)
    scaled_sae = scaled(tmp_path / SCALED)
    hub.add("tm/mlp-out", files_of(tmp_path / "mlp-out"))
    done = sae("eval", name, "--data", "rows", "--split", "all", "--json")
    assert done.json["runs"][0]["run"] == f"google/gemma-scope-2b-pt-res/{place}"
    assert f"{name} is google/gemma-scope-2b-pt-res/{place} on the hub" in done.err
    assert saecli.load_sae(name).cfg["site"] == "resid_post"
    home = Home(sae.home)
    assert lasting_name(home, name, find_subject(home, name, Silent())) == name
    plain = load(scaled_sae.path, 0.4).sae
    with pytest.warns(UserWarning, match="center_writing_weights"):
        centred = saecli.load_sae("mlp-tm/blocks.8.hook_mlp_out")
    published.assert_reads(plain, scaled_sae)
    expected = plain(X - X.mean(1, keepdim=True))
    torch.testing.assert_close(centred(X), expected, rtol=1e-5, atol=1e-4)
    done = sae("eval", "mlp-tm/blocks.8.hook_mlp_out", "--data", "rows").succeeds()
    assert "center_writing_weights" in done.err
    for words, said in (
        (["tm/mlp-out"], "which say it; install sae-lens"),
        (["scope-canonical/layer_12/canonicel"], "did you mean layer_12/canonical?"),
        (["scope-canonical"], "has 1 SAEs, and is named as scope-canonical/ID"),
        (["wg/layer_8"], "(constant_norm_rescale)"),
    ):
        done = sae("eval", *words, "--data", "rows").fails(1, said)
        assert done.err.count("\n") <= 2
    with monkeypatch.context() as patched:
        patched.setattr(constants, "ENDPOINT", "http://hub.invalid")
        patched.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
        done = sae("eval", name, "--data", "rows")
        said = f"{name} is google/gemma-scope-2b-pt-res/{place} on the hub\n"
        assert done.status == 1 and said in done.err
    hub.add("scope-canonical/layer_12", files_of(tmp_path / "mlp-out"))  # which hf:// means
    assert "blocks.8" in sae("eval", "hf://scope-canonical/layer_12", "--data", "rows").err


def test_without_saelens_an_unknown_name_says_what_to_install(sae, hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "sae_lens", None)
    sae("eval", "scope-canonical/layer_12/canonical").fails(1, "install sae-lens or name its place")


@pytest.mark.slow
def test_every_release_of_saelens_is_resolved_or_refused(tmp_path, monkeypatch):
    where = (
        "import importlib.util as u; print(u.find_spec('sae_lens').submodule_search_locations[0])"
    )
    done = captured([python_with("saelens"), "-c", where], check=True)
    text = (Path(done.stdout.strip()) / "pretrained_saes.yaml").read_text()
    install(tmp_path, text, monkeypatch)
    reasons: Counter[str] = Counter()
    for name, release in yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)).items():
        for entry in release["saes"][:2]:
            try:
                address = registered(f"{name}/{entry['id']}").address
                assert address.folder == str(entry["path"])
                assert Address.parse(f"hf://{address}") == address
            except FormatError as error:
                reasons[str(error).partition("here: ")[2]] += 1
    assert [*reasons.values()] == [2]  # per-row norms


def run_in(home: Home, name: str, created: str = "2026-01-01", complete: bool = True) -> Path:
    return make_run(home.path, name, random_sae(), "patches", 7, 0.5, created, complete)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def test_a_run_is_found_by_its_name_or_folder_with_its_split(home: Home, tmp_path: Path) -> None:
    for where, name in ((home, "first"), (home, "second"), (Home(tmp_path / "other"), "away")):
        folder = run_in(where, name)
        text = name if where is home else str(folder)
        assert find_subject(home, text, Silent()) == Subject(text, folder, "patches", 7, 0.5, True)


def test_a_librarys_folder_knows_no_store_and_a_run_goes_first(home, tmp_path, monkeypatch):
    save(SavedSAE(random_sae()), "saelens", tmp_path / "both")
    path = tmp_path / "both"
    assert find_subject(home, str(path), Silent()) == Subject(str(path), path)
    run_in(home, "both")
    monkeypatch.chdir(tmp_path)
    assert find_subject(home, "both", Silent()).folder == home.runs.path / "both"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("nosuch", RunError, "`sae list` shows every run"),
        ("begun", RunError, r"holds no SAE yet.*sae train --resume --name begun"),
        (".", FormatError, "no SAE found in"),
        ("runs/first/sae.safetensors", FormatError, "no SAE found in .*got no folder"),
    ],
)
def test_what_names_no_sae_is_refused(home, tmp_path, monkeypatch, name, error, said):
    monkeypatch.chdir(tmp_path)
    for missing in (None, "nosuch"):
        with pytest.raises(RunError, match="make one with `sae train`"):
            find_subject(home, missing, Silent())
    run_in(home, "only")
    (run_in(home, "begun", complete=False) / "sae.safetensors").unlink()
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/sae.safetensors").touch()
    with pytest.raises(error, match=said):
        find_subject(home, name, Silent())
