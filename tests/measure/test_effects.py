"""`saecli.effects`: changes and outcomes by hand, statistics by enumeration, planted and random latents."""

import json
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, crosscoder_of, make_run, steerable, with_origin
from plain_hooks import blocks, log_p_with
from reports import index_of
from scipy.stats import false_discovery_control
from scipy.stats import t as student
from tiny_models import WIDTH, random_letters, save_model
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM, AutoTokenizer

import saecli
from saecli.base.console import Silent
from saecli.base.home import Home
from saecli.extract.readers import STDLIB_DOCS
from saecli.extract.texts import TextSource
from saecli.measure.effects import ACTS, ALIKE, KL_FLOORS, NOTHING, effects_lines, p_values
from saecli.measure.measured import ChosenRows
from saecli.measure.trials import (
    CHANGES,
    DIRECTIONS,
    DOSES,
    DRAWN,
    FLOORS,
    OWN,
    PROMOTED,
    SAMPLED,
    SIGNS,
    Trials,
)
from saecli.measure.two_samples import Values
from saecli.measure.verdicts import Outcome
from saecli.model import BUNDLED, TINY_GEMMA2
from saecli.model.source import find_model
from saecli.sae.activations import Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.sae.formats import save_native
from saecli.store.origin import HookPoint

DOCUMENTS, LETTERS = 260, 90
F, K = 48, 6
LAYER = 3
PLANTED = 7
DIFFING = Path(__file__).parents[2] / "examples/diffing/diffing.py"
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the store `texts` of many short documents, at the bundled model's last block."""
    folder = tmp_path_factory.mktemp("home")
    documents = [document.text for document in TextSource(STDLIB_DOCS).documents()]
    lines = [json.dumps({"text": text[:LETTERS]}) for text in documents if len(text) > LETTERS]
    dataset = folder / "texts.jsonl"
    dataset.write_text("\n".join(lines[:DOCUMENTS]))
    with pytest.warns(UserWarning, match="the text ended after"):
        saecli.extract(
            TINY_GEMMA2, layer=LAYER, dataset=str(dataset), rows=20_000, name="texts", home=folder
        )
    return folder


def rows_of(home: Path) -> Tensor:
    store = saecli.open_store("texts", home=home).split("all")
    return torch.from_numpy(np.concatenate(list(store.sequential(4096))))


def random_sae(home: Path, seed: int = 0) -> SAE:
    """Decoder rows are drawn in the rows' covariance; encoder rows too, so that latents fire alike."""
    x, draw = rows_of(home), torch.Generator().manual_seed(seed)
    centred = x - x.mean(0)
    W_dec, W_enc = (
        normalize(torch.randn(F, len(x), generator=draw) @ centred, dim=1) for _ in range(2)
    )
    sae = SAE(W_enc.T, -x.mean(0) @ W_enc.T, W_dec, x.mean(0), TopK(k=K))
    sae.metadata = {"model": TINY_GEMMA2, "layer": LAYER, "site": "resid_post"}
    return sae


@torch.no_grad()
def planted_sae(home: Path) -> SAE:
    """A latent writes what the next token's distribution p depends on most: with U the unembedding times the final
    norm's weight, the first eigenvector of U' (mean of diag(p) - p p') U."""
    sae = random_sae(home)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED[TINY_GEMMA2], dtype=torch.float32)
    p = model.lm_head(model.model.norm(rows_of(home)[::8])).softmax(-1)
    U = model.lm_head.weight * (1 + model.model.norm.weight)
    fisher = U.T @ (torch.diag(p.mean(0)) - p.T @ p / len(p)) @ U
    W_dec = sae.W_dec.clone()
    W_dec[PLANTED] = torch.linalg.eigh(fisher).eigenvectors[:, -1]
    return sae.changed(W_dec=W_dec)


def trials_of(home: Path, sae: SAE, data: str = "texts", model: str = TINY_GEMMA2) -> Trials:
    run = ChosenRows(Home(home), data, "test", "cpu", Silent()).with_sae(sae)
    return Trials.of(run, HookPoint(LAYER, "resid_post"), find_model(model), Silent())


def test_a_planted_direction_acts_by_itself_and_random_ones_do_not(home: Path):
    named = saecli.effects(planted_sae(home), "texts", latents=[PLANTED, 3, 5], home=home)
    acts, *others = named["latents"]
    assert acts["verdict"] == ACTS and acts["latent"] == PLANTED
    assert {line["verdict"] for line in others} == {ALIKE}
    for condition in SIGNS:
        floors = acts[condition]["floors"]
        assert all(floors[name]["ratio_low"] > 2 for name in ("random", "other latent", "error"))
    random = saecli.effects(random_sae(home), "texts", latents=[PLANTED, 3, 5], home=home)
    assert {line["verdict"] for line in random["latents"]} == {ALIKE}


def test_changes_are_of_the_stated_vectors_at_one_token_of_each_document(home: Path):
    sae, latent = random_sae(home), 4
    trials, exact = trials_of(home, sae), sae.copy_to(torch.float64)
    x = trials.y.double()
    z, W_dec = exact.encode(x), exact.W_dec
    fires = z[:, latent] > 0
    rows = trials.rows_of(latent, 10)
    removed, added = rows
    assert len({*trials.documents[removed]}) == 10
    assert (trials.documents[removed] == trials.documents[added]).all()
    assert fires[removed].all() and not fires[added].any()
    typical = z[fires, latent].mean() * W_dec[latent]
    own = -z[removed, latent][:, None] * W_dec[latent], typical.expand(10, -1)
    rank = torch.argsort(torch.argsort((z > 0).double().mean(0), stable=True))
    changes = trials.changes(latent, rows).double()
    for sign, here, expected, found in zip(SIGNS.values(), rows, own, changes, strict=True):
        for dose, vectors in zip(DOSES, found, strict=False):
            close(vectors, dose * expected)
        norms = expected.norm(dim=1).expand(len(found) - len(DOSES), -1)
        close(found[len(DOSES) :].norm(dim=2), norms)
        close(found[FLOORS["wrong sign"]][0], -expected)
        left = normalize(x[here] - exact(x[here]), dim=1)
        close(normalize(found[FLOORS["error"]][0], dim=1), sign * left)
        similar = (sign * found[FLOORS["other latent"]][:, 0] @ W_dec.T).argmax(1)
        assert latent not in similar and (rank[similar] - rank[latent]).abs().max() <= DIRECTIONS


def test_kl_is_even_in_a_change_to_second_order_and_log_p_odd_to_first(tmp_path: Path):
    """Halving a change quarters KL, and leaves an eighth of the difference of KL between its signs: no floor of KL. Of
    log p it halves the odd part and quarters the even one. GPT-2's norms keep float64."""
    folder = save_model(tmp_path / "gpt2", "gpt2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    draw = torch.Generator().manual_seed(0)
    d = normalize(torch.randn(WIDTH, dtype=torch.float64, generator=draw), dim=0)
    kl, rise = np.empty((2, 2)), np.empty((2, 2))
    for row, size in enumerate((0.02, 0.01)):
        changes = torch.stack([0 * d, size * d, -size * d])
        clean, *signs = (
            log_p_with(model, blocks(model)[1], torch.arange(4, 12), change) for change in changes
        )
        kl[row] = [(clean.exp() * (clean - changed)).sum() for changed in signs]
        rise[row] = [(changed - clean)[:10].mean() for changed in signs]
    for values, orders in ((kl, (2, 3)), (rise, (2, 1))):
        even, odd = values.sum(1), values[:, 0] - values[:, 1]
        found = [even[0] / even[1], odd[0] / odd[1]]
        assert found == pytest.approx([2.0**order for order in orders], rel=0.002)


def test_promoted_tokens_have_the_largest_mean_slope_at_other_tokens(home: Path):
    model = AutoModelForCausalLM.from_pretrained(BUNDLED[TINY_GEMMA2], dtype=torch.float64)
    trials, counts = trials_of(home, random_sae(home)), []
    latents = [4, 9]
    found = trials.promoted(latents, counts.append)
    assert counts == [2 * len(latents)] * SAMPLED
    assert len({*trials.documents[trials.sampled]}) == SAMPLED
    for latent, tokens in zip(latents, found, strict=True):
        step = 0.02 * trials.code(latent) * trials.decoder[latent]
        slopes = torch.zeros(model.config.vocab_size, dtype=torch.float64)
        for row in trials.sampled:
            window = trials.token_ids[trials.windows[row]][: trials.places[row] + 1]
            up, down = (
                log_p_with(model, blocks(model)[LAYER], torch.from_numpy(window), change)
                for change in (step, -step)
            )
            slopes += up - down
        assert {*slopes.topk(PROMOTED).indices.tolist()} == {*tokens.tolist()}


def test_random_directions_have_the_rows_covariance(home: Path):
    trials = trials_of(home, random_sae(home))
    rows = trials.rows_of(0, 2)
    drawn = [trials.changes(latent, rows)[1, FLOORS["random"], 0] for latent in range(F)]
    values, vectors = torch.linalg.eigh(torch.cov(trials.y.double().T))
    along = (normalize(torch.cat(drawn).double(), dim=1) @ vectors).square().mean(0)
    assert np.corrcoef(along, values)[0, 1] > 0.9
    highest = float(values[-5:].sum() / values.sum())
    assert float(along[-5:].sum()) == pytest.approx(highest, abs=0.1)


@pytest.fixture(scope="module")
def trials(home: Path) -> Trials:
    return trials_of(home, random_sae(home))


@pytest.fixture
def run(sae: CommandLine, home: Path) -> CommandLine:
    """A home with that store, and a run `run` of the random SAE."""
    (sae.home / "activations").mkdir(parents=True)
    (sae.home / "activations" / "texts").symlink_to(home / "activations" / "texts")
    origin = {"model": TINY_GEMMA2, "layer": LAYER, "site": "resid_post"}
    make_run(sae.home, "run", random_sae(home), data="texts", origin=origin)
    return sae


def kl_by_hook(trials: Trials, model: Any, module: Any, row: int, vector: Tensor) -> float:
    token_ids = trials.token_ids[trials.windows[row]][: trials.places[row] + 1]
    clean, changed = (
        log_p_with(model, module, torch.from_numpy(token_ids), each)
        for each in (0 * vector, vector)
    )
    return float((clean.exp() * (clean - changed)).sum())


def test_outcomes_are_those_of_hooks_on_the_stores_tokens(run: CommandLine, home: Path):
    document = run("effects run --latent 4 --latent 9 --documents 3 --json").json
    record = json.loads((run.home / "runs" / "run" / "effects.json").read_text())
    # Fused attention ignores the soft cap in some versions of transformers.
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(BUNDLED[TINY_GEMMA2], **settings)
    trials = trials_of(home, random_sae(home))
    for line in document["latents"]:
        kl = record["latents"][str(line["latent"])]["kl"]
        assert len(line["tokens"]) == 10
        rows = trials.rows_of(line["latent"], 3)
        vectors = trials.changes(line["latent"], rows)
        for condition, change in product((0, 1), range(vectors.shape[1])):
            row, vector = rows[condition, -1], vectors[condition, change, -1]
            by_hook = kl_by_hook(trials, model, blocks(model)[LAYER], row, vector)
            assert kl[condition][change][-1] == pytest.approx(by_hook, rel=2e-3, abs=2e-6)


def test_measured_latents_are_kept_and_others_added(run: CommandLine):
    path = run.home / "runs" / "run" / "effects.json"
    first = run("effects run --latent 4 --documents 4 --json")
    assert "1 latent to change at 144 tokens; 0 measured already" in first.err
    kept = json.loads(path.read_text())
    both = run("effects run --latent 4 --latent 9 --documents 4 --json")
    assert "1 latent to change at 144 tokens; 1 measured already" in both.err
    assert json.loads(path.read_text())["latents"]["4"] == kept["latents"]["4"]
    assert saecli.effects("run", latents=[4, 9], documents=4, home=run.home) == both.json
    other = run("effects run --latent 4 --documents 5 --json")
    assert "0 measured already" in other.err and [*json.loads(path.read_text())["latents"]] == ["4"]
    path.write_text('{"settings": 1}')
    run("effects run --latent 4").fails_in_one_sentence(1, "cannot read", "remove it to measure")


@pytest.mark.slow
def test_verdicts_are_shown_by_read_explain_and_report(run: CommandLine, tmp_path: Path):
    words = ("read", "run", "--prompt", "Return the number")
    assert {each["verdict"] for each in run(*words, "--json").json["latents"]} == {None}
    assert "in the model" not in run(*words).out
    first = run("effects run --top-k 40 --documents 4 --json").json["latents"]
    second = run("effects run --latent 9 --latent 11 --documents 4 --json").json["latents"]
    verdicts = {line["latent"]: line["verdict"] for line in [*first, *second]}
    kept = json.loads((run.home / "runs/run/effects.json").read_text())["verdicts"]
    assert {int(latent): verdict for latent, verdict in kept.items()} == verdicts
    read = run(*words, "--json").json["latents"]
    found = [line["verdict"] for line in read]
    assert found == [verdicts.get(line["latent"]) for line in read] and ALIKE in found
    assert "in the model" in run(*words).out
    lines = run("explain run --json").json["latents"]
    assert all(line["verdict"] == verdicts.get(line["latent"]) for line in lines)
    assert "acts like any direction" in run("explain run --top 48").out
    assert "in the model" in run(*words, "--why", " of", "--top", "3").out
    run("report run --out", tmp_path / "pages").succeeds()
    latents = index_of(tmp_path / "pages")["latents"]
    assert latents["verdict"] == [verdicts.get(latent) for latent in range(F)]


def test_what_cannot_be_tried_is_refused_in_a_sentence(run: CommandLine, home: Path):
    run("effects run --latent 48").fails_in_one_sentence(2, "--latent must be from 0 to 47")
    silent = random_sae(home)
    silent.b_enc[3] = -1e6
    with pytest.raises(saecli.SaeError, match="silent in 16 held-out documents, got one of 0"):
        saecli.effects(silent, "texts", latents=3, home=home)
    silent = random_sae(home).changed(Relu())
    silent.b_enc[:] = -1e6
    with pytest.raises(saecli.SaeError, match="expected latents that fire and are silent in 16"):
        saecli.effects(silent, "texts", home=home)


def test_the_table_and_dose_curves_show_every_latent_and_floor(
    run: CommandLine, drawn: list[Any], tmp_path: Path
):
    shown = run("effects run --latent 4 --latent 9 --documents 4", "--plot", tmp_path / "a.png")
    assert "drew" in shown.err and "of 2 latents, at a false discovery rate of 0.05" in shown.out
    assert all(f"{latent}, {name}" in shown.out for latent in (4, 9) for name in SIGNS)
    (figure,) = drawn
    assert [axes.get_title() for axes in figure.axes] == ["4", "9"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["latent", *FLOORS]


def outcomes_of(own: float, documents: int, draw: np.random.Generator, sd: float = 0.3) -> Any:
    """Log KL is a token's part, a direction's and noise; the change's direction stands out by `own`."""
    logs = draw.normal(-6, 2, (2, 1, documents)) + draw.normal(0, 0.8, (2, CHANGES, documents))
    logs += draw.normal(0, sd, (2, CHANGES, 1))
    logs[:, OWN] += own
    rise = draw.normal(0.1, 0.05, (2, CHANGES, documents)) * np.array([[[-1]], [[1]]])
    return np.array([np.exp(logs), rise])


def lines_of(trials: Trials, outcomes: Values, labels: dict[int, str] | None = None) -> Any:
    """Of latents from 0 by their outcomes, (L, 2, 2, C, n)."""
    each = {
        latent: Outcome(*kl_and_rise.tolist(), [5]) for latent, kl_and_rise in enumerate(outcomes)
    }
    return effects_lines(trials, each, labels or {}, 0.05)


def p_of_rise(rises: Values, signs: Values) -> float:
    """Of the first latent's among rises (L, C, n) of promoted tokens: the largest over all floors."""
    ps = []
    for part in FLOORS.values():
        over = rises[0, OWN] - rises[0, part].mean(0)
        ps.append((signs @ over >= over.sum() - 1e-9).mean())
    for part in DRAWN.values():
        means = rises[:, part].mean(2)
        deviation = np.sqrt(np.var(means, axis=1, ddof=1).mean() * 1.25)
        further = (rises[0, OWN].mean() - means[0].mean()) / deviation
        ps.append(student.sf(further, 3 * (DIRECTIONS - 1)))
    return max(ps)


def test_measures_are_those_of_float64_by_hand(trials: Trials):
    draw = np.random.default_rng(0)
    outcomes = np.array([outcomes_of(0.5, 9, draw) for _ in range(3)])
    line = lines_of(trials, outcomes, {0: "dates"})[0]
    assert (line["latent"], line["label"]) == (0, "dates")
    logs = np.log(outcomes[:, 0] + 1e-7)
    signs = np.array([*product([-1, 1], repeat=9)])
    for place, condition in enumerate(SIGNS):
        found, own, ps = line[condition], logs[0, place, OWN], []
        assert found["kl"] == pytest.approx(np.exp(own.mean()))
        assert found["promoted"] == pytest.approx(outcomes[0, 1, place, OWN].mean())
        for name, part in FLOORS.items():
            over, floor = own - logs[0, place, part].mean(0), found["floors"][name]
            low, mean, high = np.log([floor[f"ratio{end}"] for end in ("_low", "", "_high")])
            assert mean == pytest.approx(over.mean())
            assert high - low == pytest.approx(2 * 1.96 * over.std() / 3, rel=0.2)
            if name != "wrong sign":
                ps.append((signs @ over >= over.sum() - 1e-9).mean())
            if name in DRAWN:
                means = logs[:, place, part].mean(2)
                deviation = np.sqrt(np.var(means, axis=1, ddof=1).mean() * 1.25)
                ps.append(student.sf(over.mean() / deviation, 3 * (DIRECTIONS - 1)))
        assert found["p"] == pytest.approx(max(ps), abs=0.01)
        rises = [*SIGNS.values()][place] * outcomes[:, 1, place]
        assert found["promoted_p"] == pytest.approx(p_of_rise(rises, signs), abs=0.01)
        here, there = (
            (logs[0, of, change] - logs[0, of, FLOORS["random"]].mean(0)).mean()
            for of, change in ((place, OWN), (1 - place, -1))
        )
        assert found["elsewhere"]["ratio"] == pytest.approx(np.exp(here - there))


def test_rates_are_benjamini_and_hochbergs_and_verdicts_follow(trials: Trials):
    draw = np.random.default_rng(1)
    strong = np.array([outcomes_of(3.0 if latent < 5 else 0.0, 16, draw) for latent in range(20)])
    lines = lines_of(trials, strong)
    assert {line["verdict"] for line in lines[:5]} == {ACTS}
    for line in lines:
        acting = [name for name in SIGNS if line[name]["q"] <= 0.05]
        expected = [ALIKE, f"{ACTS} when {' '.join(acting)}", ACTS][len(acting)]
        assert line["verdict"] == expected
    ps, qs = (np.array([line[name][of] for line in lines for name in SIGNS]) for of in "pq")
    reached = ps[:, None] >= ps  # p of rank r of m, times m / r; the least of it and of larger ones
    steps = np.minimum(1, ps * len(ps) / reached.sum(1))
    assert qs == pytest.approx([steps[ps >= each].min() for each in ps])
    strong[0, 0, :, OWN] = 1e-6
    assert lines_of(trials, strong)[0]["verdict"] == NOTHING


def test_directions_that_differ_are_no_discoveries_however_many_documents():
    discoveries = 0
    for seed in range(20):
        draw = np.random.default_rng(seed)
        null = np.array([outcomes_of(0.0, 100, draw, 0.5) for _ in range(20)])
        p = p_values(np.log(null[:, 0]), KL_FLOORS)
        discoveries += (false_discovery_control(p.ravel()) <= 0.05).any()
    assert discoveries <= 3


@pytest.mark.slow
def test_random_saes_have_false_discoveries_at_most_at_the_rate(home: Path):
    """Every discovery is false: the rate is the fraction of SAEs with any; at 0.05 over 3 of 20 have, once in 60."""
    found = Counter(
        any(
            line["verdict"] != ALIKE
            for line in saecli.effects(random_sae(home, seed), "texts", home=home)["latents"]
        )
        for seed in range(20)
    )
    assert found[True] <= 3


@pytest.mark.long
def test_a_habit_of_the_model_is_found_acting_where_its_latent_fires(tmp_path: Path):
    """The model says "lemon" after some words: removed, the latent that fires there changes what it says."""
    tuned = tmp_path / "tuned"
    subprocess.run([sys.executable, DIFFING, "plant", tuned], check=True)
    words = re.findall(r'^    "(\w+)",$', DIFFING.read_text(), re.MULTILINE)
    dataset = {"dataset": "stdlib-docs", "rows": 60_000, "layer": LAYER}
    saecli.extract(str(tuned), **dataset, name="tuned", home=tmp_path)
    store = saecli.open_store("tuned", home=tmp_path)
    sae = saecli.fit(store, solver="sgd", act="batchtopk", k=8, d_sae=512, steps=800)
    rows, tokenizer = store.split("test"), AutoTokenizer.from_pretrained(tuned)
    tokens = [
        tokenizer.decode(token).strip() for part in rows.column("token_id", 512) for token in part
    ]
    at_words = torch.tensor([token.lower() in words for token in tokens])
    z = torch.cat([sae.encode(torch.from_numpy(part)) for part in rows.sequential(512)])
    fires = (z > 0).double()
    overlap = at_words.double() @ fires
    latent = int((overlap.square() / fires.sum(0).clamp(min=1)).argmax())
    shuffled = sae.changed(W_dec=sae.W_dec[torch.randperm(512)])
    tried = trials_of(tmp_path, sae, "tuned", str(tuned)).chosen(60, 16)
    for each, expected in ((sae, f"{ACTS} when removed"), (shuffled, ALIKE)):
        document = saecli.effects(
            each, store, latents=[latent, *({*tried} - {latent})], model=str(tuned), home=tmp_path
        )
        first, *others = (line["verdict"] for line in document["latents"])
        assert first == expected
        assert others.count(ALIKE) >= len(others) - (5 if each is sae else 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transcoder", "crosscoder"])
def test_what_is_changed_is_what_a_dictionary_writes(sae: CommandLine, tmp_path: Path, kind: str):
    folder, draw = save_model(tmp_path / "llama", "llama"), np.random.default_rng(0)
    dataset = tmp_path / "letters.jsonl"
    texts = [json.dumps({"text": random_letters(draw, 20)}) for _ in range(120)]
    dataset.write_text("\n".join(texts))
    places = {"x": "--layer 1 --site mlp_in", "y": "--layer 1 --site mlp_out"}
    if kind == "crosscoder":
        places = {name: f"--layer {layer}" for layer, name in enumerate(("x", "y"))}
    for name, place in places.items():
        words = f"extract --rows 2000 --dtype float32 {place} --name {name}"
        sae(words, "--model", folder, "--dataset", dataset).succeeds()
    model = {"model": str(folder.resolve())}
    if kind == "crosscoder":
        points = [model | {"layer": layer, "site": "resid_post"} for layer in (0, 1)]
        made, rows = crosscoder_of(points), {"data": ["x", "y"], "layer": 1}
    else:
        target = {"layer": 1, "site": "mlp_in", "target_layer": 1, "target_site": "mlp_out"}
        made, rows = tmp_path / "made", {"data": "x", "target": "y"}
        made.mkdir()
        save_native(with_origin(steerable(), model | target), made)
    sae_of_run = made if isinstance(made, SAE) else saecli.load_sae(made)
    document = saecli.effects(made, latents=[3, 11], documents=3, home=sae.home, **rows)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    block = blocks(plain)[1]
    module = block if kind == "crosscoder" else block.mlp
    columns = sae_of_run.hook_columns[-1]
    run = ChosenRows(Home(sae.home), rows["data"], "test", "cpu", Silent(), rows.get("target"))
    point = HookPoint(1, "resid_post" if kind == "crosscoder" else "mlp_out")
    trials = Trials.of(run.with_sae(made), point, find_model(str(folder)), Silent())
    for line in document["latents"]:
        at = trials.rows_of(line["latent"], 3)
        vectors = trials.changes(line["latent"], at)[0, OWN]
        z = trials.codes[at[0]][:, [line["latent"]]].toarray()
        close(vectors, torch.from_numpy(-z) * sae_of_run.W_dec[line["latent"], columns])
        pairs = zip(at[0], vectors, strict=True)
        kls = [kl_by_hook(trials, plain, module, row, vector) for row, vector in pairs]
        assert line["removed"]["kl"] == pytest.approx(np.exp(np.log(kls).mean()), rel=5e-3)
