"""`saecli.read` and `sae read` against hooks written by hand, and what they print and write."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import (
    CommandLine,
    change_json,
    crosscoder_of,
    make_run,
    steerable,
    trained_on_docs,
    with_origin,
)
from plain_hooks import blocks, noted
from rich.console import Console
from tiny_models import CONFIGS, save_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import saecli
from saecli.model import BUNDLED, TINY_GEMMA2
from saecli.sae.activations import Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.sae.formats import save_native
from saecli.show.prompts import ColouredText

AT: dict[str, Any] = {"layer": 1, "site": "resid_post"}
EVERY = list(range(20))
TEXT = "fghabz"


@torch.no_grad()
def activations(model: nn.Module, module: nn.Module, ids: list[int], side: str = "out") -> Tensor:
    """A module's output, or input, on the tokens, (T, D), by a hook of its own."""
    with noted(module, side) as seen:
        model(torch.tensor([ids]), use_cache=False)
    return seen[0].reshape(len(ids), -1)


def opened(folder: Path) -> tuple[nn.Module, list[int]]:
    """A model, and the tokens of the text."""
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval(), ids


def demand_codes(document: dict[str, Any], sae: SAE, x: Tensor, special: list[int]) -> np.ndarray:
    """The codes of the activations by hand, (T, F), which the document's latents, all of the SAE's, must have."""
    z = torch.relu(x @ sae.W_enc + sae.b_enc).numpy()
    z[special] = 0
    found = np.zeros_like(z)
    for latent in document["latents"]:
        found[latent["positions"], latent["latent"]] = latent["codes"]
    np.testing.assert_allclose(found, z, rtol=1e-3, atol=1e-4)
    return z


@pytest.mark.parametrize("kind", CONFIGS)
def test_codes_are_those_of_a_hook_written_by_hand(tmp_path: Path, kind: str):
    folder, sae = save_model(tmp_path / "model", kind), steerable(Relu())
    document = saecli.read(sae, TEXT, str(folder), latents=EVERY, top=3, **AT)
    model, ids = opened(folder)
    assert ids[0] == 1
    z = demand_codes(document, sae, activations(model, blocks(model)[1], ids), [0])
    assert [token["token_id"] for token in document["tokens"]] == ids
    assert [token["text"].strip() for token in document["tokens"]] == ["<bos>", *TEXT]
    assert [token["special"] for token in document["tokens"]] == [True] + [False] * 6
    for position, token in enumerate(document["tokens"]):
        strongest = [entry["latent"] for entry in token["latents"]]
        fires = np.count_nonzero(z[position])
        assert strongest == np.argsort(-z[position], kind="stable")[: min(3, fires)].tolist()
    for latent in document["latents"]:
        own = z[:, latent["latent"]]
        assert latent["code"] == pytest.approx(own.max(), rel=1e-3)
        assert latent["fires_on"] == np.count_nonzero(own)
        if own.any():
            assert latent["token"].strip() == ["<bos>", *TEXT][own.argmax()]
            assert latent["position"] == own.argmax()
    sizes = [latent["code"] for latent in document["latents"]]
    assert sizes == sorted(sizes, reverse=True)
    strongest = saecli.read(sae, TEXT, str(folder), top=3, **AT)["latents"]
    assert strongest == document["latents"][:3]
    assert [strongest[0][name] for name in ("frequency", "label")] == [None, None]


def test_a_text_with_its_own_bos_is_read_as_without_it(tmp_path: Path):
    folder, sae = save_model(tmp_path / "model", "llama"), steerable(Relu())
    plain = saecli.read(sae, TEXT, str(folder), **AT)
    with pytest.warns(UserWarning, match="the text begins with BOS, .* it is there once"):
        assert saecli.read(sae, f"<bos>{TEXT}", str(folder), **AT) == plain


def test_the_first_token_without_bos_has_no_codes(tmp_path: Path):
    folder, sae = save_model(tmp_path / "model", "gpt2", bos=False), steerable(Relu())
    sae.metadata = {"prepend_bos": False}
    document = saecli.read(sae, TEXT, str(folder), latents=EVERY, **AT)
    model, ids = opened(folder)
    assert [token["token_id"] for token in document["tokens"]] == ids
    assert [token["special"] for token in document["tokens"]] == [True] + [False] * 5
    demand_codes(document, sae, activations(model, blocks(model)[1], ids), [0])
    alone = saecli.read(sae, "f", str(folder), **AT)
    assert (len(alone["tokens"]), alone["latents"]) == (1, [])


def test_a_long_text_is_read_in_windows_of_the_models_limit(tmp_path: Path):
    folder, sae = save_model(tmp_path / "model", "gpt2"), steerable(Relu())
    with pytest.warns(UserWarning, match="98 tokens: it is read in 2 windows of at most 64"):
        document = saecli.read(sae, TEXT * 16, str(folder), latents=EVERY, **AT)
    model, (_, *ids) = opened(folder)
    windows = [[1, *(ids * 16)[:63]], [1, *(ids * 16)[63:]]]
    x = torch.cat([activations(model, blocks(model)[1], window) for window in windows])
    demand_codes(document, sae, x, [0, 64])
    special = [at for at, token in enumerate(document["tokens"]) if token["special"]]
    assert special == [0, 64]


def test_a_transcoder_has_the_codes_of_what_it_reads(tmp_path: Path):
    folder, sae = save_model(tmp_path / "model", "llama"), steerable(Relu())
    place = {"layer": 1, "site": "mlp_in", "target_layer": 1, "target_site": "mlp_out"}
    (tmp_path / "transcoder").mkdir()
    save_native(with_origin(sae, {"model": str(folder), **place}), tmp_path / "transcoder")
    document = saecli.read(tmp_path / "transcoder", TEXT, latents=EVERY)
    assert (document["layer"], document["site"]) == (1, "mlp_in")
    model, ids = opened(folder)
    demand_codes(document, sae, activations(model, blocks(model)[1].mlp, ids, "in"), [0])


def test_a_crosscoder_reads_all_its_hook_points_of_one_model_and_none_of_two(tmp_path: Path):
    folder = save_model(tmp_path / "model", "llama")
    inputs = [{"layer": layer, "site": "resid_post"} for layer in (2, 0)]
    cross = crosscoder_of(inputs)
    cross.metadata |= {"model": str(folder)}
    document = saecli.read(cross, TEXT, latents=EVERY)
    assert document["inputs"] == inputs
    model, ids = opened(folder)
    x = torch.cat([activations(model, blocks(model)[layer], ids) for layer in (2, 0)], dim=1)
    demand_codes(document, cross, x, [0])
    for point, name in zip(inputs, ("one", "two"), strict=True):
        point["model"] = name
    with pytest.raises(saecli.SaeError, match="is not defined: expected an SAE of one model"):
        saecli.read(cross, TEXT)


def test_compare_lists_latents_by_the_difference_of_their_largest_codes(tmp_path: Path):
    folder, sae = save_model(tmp_path / "model", "llama"), steerable(TopK(k=3))
    both = saecli.read(sae, TEXT, str(folder), compare="bbcd", latents=EVERY, **AT)
    one, two = (saecli.read(sae, text, str(folder), latents=EVERY, **AT) for text in (TEXT, "bbcd"))
    assert both | {"compare": None} == one
    assert both["compare"]["tokens"] == two["tokens"]
    largest = [{line["latent"]: line["code"] for line in own["latents"]} for own in (one, two)]
    lines = both["compare"]["latents"]
    for line in lines:
        expected = largest[0][line["latent"]] - largest[1][line["latent"]]
        assert line["difference"] == pytest.approx(expected)
    sizes = [abs(line["difference"]) for line in lines]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 0


def test_characters_of_several_tokens_and_chats_are_shown_whole(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED[TINY_GEMMA2], folder)
    text, sae = "a \N{SLIGHTLY SMILING FACE} b\n\tc ü", steerable(Relu(), d_in=128)
    tokens = saecli.read(sae, text, str(folder), **AT)["tokens"]
    assert "".join(token["text"] for token in tokens[1:]) == text
    assert "" in [token["text"] for token in tokens] and {token["role"] for token in tokens} == {
        None
    }
    chat = [{"role": "user", "content": "What is it"}, {"role": "assistant", "content": "It is a"}]
    with pytest.raises(saecli.SaeError, match="has no chat template"):
        saecli.read(sae, chat, str(folder), **AT)
    template = "{% for m in messages %}<eos>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    tokens = saecli.read(sae, chat, str(folder), **AT)["tokens"]
    words = "".join(token["text"] for token in tokens)
    assert words == "<bos><eos>user: What is it<eos>assistant: It is a"
    assert [token["text"] for token in tokens if token["special"]] == ["<bos>", "<eos>", "<eos>"]
    said = "".join(token["text"] for token in tokens if token["role"] == "assistant")
    assert said.strip() == "It is a"


@pytest.fixture
def home(sae: CommandLine) -> CommandLine:
    """A home with an SAE of the bundled model's width."""
    origin = {"model": TINY_GEMMA2, **AT}
    make_run(sae.home, "first", steerable(Relu(), d_in=128), origin=origin)
    return sae


NASTY = "Return </script><img src=x> the\nnumber of & items"


class Page(HTMLParser):
    """The attributes that a page's elements have, and the text of its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: list[str] = []
        self.data, self._in_data = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.places += [str(value) for name, value in attrs if name in ("src", "href")]
        self._in_data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self.data += data if self._in_data else ""


def test_the_page_holds_the_document_and_names_no_other_place(home: CommandLine, tmp_path: Path):
    page = tmp_path / "page.html"
    words = ("read", "first", "--prompt", NASTY, "--compare", "Once", "--top", "2")
    done = home(*words, "--html", page, "--json")
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert parsed.places == ["data:,"] and "http://www.w3.org/2000/svg" in text
    assert not re.findall(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text)
    data = json.loads(parsed.data)
    assert "".join(token["text"] for token in data["tokens"][1:]) == NASTY
    of_python = saecli.read("first", NASTY, compare="Once", top=2, latents="listed", home=home.home)
    of_python["model"] = Path(of_python["model"]).name  # pages are shown to others
    assert data == json.loads(json.dumps(of_python))
    both = [*data["tokens"], *data["compare"]["tokens"]]
    listed = {entry["latent"] for token in both for entry in token["latents"]}
    assert {latent["latent"] for latent in data["latents"]} == listed
    assert done.json["latents"] == data["latents"][:2]
    assert len(home(*words, "--json").json["compare"]["latents"]) == 2


def test_the_terminal_lists_tokens_and_latents_and_colours_a_text(home: CommandLine):
    document = saecli.read("first", NASTY, top=2, home=home.home)
    done = home("read", "first", "--top", "2", "--prompt", NASTY).succeeds()
    for position, token in enumerate(document["tokens"]):
        line = next(line for line in done.out.splitlines() if line.startswith(f"{position:>5}  "))
        for entry in token["latents"]:
            assert f"{entry['latent']} ({entry['code']:.3g})" in line
        assert ("special" in line) == token["special"]
    strongest = document["latents"][0]
    assert f"│ {strongest['latent']} " in done.out
    shown = home("read", "first", "--prompt", NASTY, "--latent", strongest["latent"]).out
    peak = document["tokens"][strongest["position"]]["text"].strip()
    assert f"fires on {strongest['fires_on']} token" in shown
    assert f"{peak}|{strongest['code']:.3g}]" in shown
    codes = dict(zip(strongest["positions"], strongest["codes"], strict=True))
    console = Console(force_terminal=True, color_system="truecolor", width=400)
    with console.capture() as captured:
        console.print(ColouredText(document["tokens"], codes, strongest["code"]))
    backgrounds = re.findall(r"\x1b\[30;48;2;(\d+);(\d+);(\d+)m([^\x1b]+)", captured.get())
    coloured = "".join(piece for *_, piece in backgrounds).replace("↵", "")
    fired = "".join(document["tokens"][position]["text"] for position in codes)
    assert "".join(coloured.split()) == "".join(fired.split())
    assert ("240", "160", "0") in [tuple(found[:3]) for found in backgrounds]


def test_each_token_has_one_line_cut_in_a_narrow_terminal_and_whole_in_a_pipe(home: CommandLine):
    home.monkeypatch.setenv("COLUMNS", "50")
    words = ("read", "first", "--top", "15", "--prompt", "Return the number")
    piped = home(*words).out.splitlines()
    tokens = home(*words, "--json").json["tokens"]
    for name in ("COLUMNS", "LINES"):
        home.monkeypatch.delenv(name, raising=False)
    home.monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a terminal of it
    home.monkeypatch.setenv("TERM", "dumb")  # 80 wide, without colours
    for lines in (piped, home(*words).out.splitlines()):
        begin = next(at for at, line in enumerate(lines) if line.startswith("    0"))
        end = begin + len(tokens)
        assert [int(line[:5]) for line in lines[begin:end]] == [*range(len(tokens))]
        assert lines[end] == ""
        if lines is piped:
            listed = [line.count("(") for line in lines[begin:end]]
            assert listed == [len(token["latents"]) for token in tokens]
        else:
            assert max(map(len, lines[begin:end])) == 80


@pytest.mark.slow
def test_frequencies_are_of_the_runs_store_and_labels_of_its_folder(sae: CommandLine):
    z = trained_on_docs(sae)
    labels = sae.home / "runs" / "first" / "labels.json"
    labels.write_text(json.dumps({str(latent): f"label {latent}" for latent in range(64)}))
    words = ("read", "first", "--prompt", "Return the number")
    document = sae(*words, "--json").json
    assert document["store_rows"] == 2000
    for latent in document["latents"]:
        fraction = float((z[:, latent["latent"]] != 0).double().mean())
        assert latent["frequency"] == pytest.approx(fraction, abs=1e-3)
        assert latent["label"] == f"label {latent['latent']}"
    assert document["latents"][0]["label"] in sae(*words).out
    labels.write_text('{"first": "label"}')
    sae(*words).fails(1, "labels.json: expected latents 0 to 63")
    labels.unlink()
    change_json(sae.home / "activations" / "docs" / "store.json", shard_count=0, complete=False)
    for has_store in (True, False):  # one without rows yet, and none
        (latent, *_) = sae(*words, "--json").json["latents"]
        assert (latent["frequency"], latent["label"]) == (None, None)
        assert not has_store or sae("rm", "docs", "--yes").status == 0


def test_a_token_beyond_the_models_embedding_is_refused(tmp_path: Path):
    config = CONFIGS["llama"]()
    config.vocab_size = 10
    folder = save_model(tmp_path / "model", config)
    with pytest.raises(saecli.SaeError, match="its embedding has 10 tokens"):
        saecli.read(steerable(), TEXT, str(folder), **AT)
