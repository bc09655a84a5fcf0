"""What the measuring commands and their Python functions refuse: exit status, and the beginning of one sentence."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import storing
import torch
from homes import after_commands, make_run, make_store, random_sae, some_rows, steerable

import saecli
from saecli.model import TINY_GEMMA2

QUICK = "train --epochs 2 --batch-size 64 --data rows"
TRAINED = (
    f"{QUICK} --name run",
    f"{QUICK} --init run --name from",
    f"{QUICK} --data others --name both",
    "refit seed-0 --name refit-run",  # whose decoder is far from the optimum
)
READS = {"model": TINY_GEMMA2, "layer": 1, "site": "resid_post"}
TWO = [{"layer": layer, "site": "resid_post"} for layer in (1, 2)]
COLUMNS = ("document", "position", "token_id")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with runs that a command takes, and runs that it does not."""
    home = tmp_path_factory.mktemp("refusals") / "home"
    for store, rows in {
        "rows": some_rows(400),
        "others": some_rows(400, seed=1),
        "narrow": some_rows(50, 5),
        "broad": some_rows(400, 16),
    }.items():
        make_store(home, store, rows)
    of_tokens = READS | {"context": 12}
    sources = {"last": of_tokens | {"positions": "last"}, "unnamed": of_tokens | {"model": None}}
    for name, source in sources.items():
        columns = dict.fromkeys(COLUMNS, np.arange(20))
        place = home / "activations" / name
        windows = name == "unnamed"
        storing.make_store(place, some_rows(20), columns=columns, source=source, windows=windows)
    (home / "a.txt").write_text("a")
    (home / "latin.txt").write_bytes("ä".encode("latin-1"))
    (home / "chat.json").write_text('[{"role": "user", "content": "a"}]')
    for seed, name, data in (
        (0, "seed-0", "rows"),
        (1, "seed-1", "rows"),
        (2, "other", "others"),
        (3, "old", "rows"),
        (4, "last", "last"),
    ):
        make_run(home, name, random_sae(seed=seed), data=data)
    make_run(home, "thin", random_sae(d_in=5), data="narrow")
    for name, width, target in (("thick", 16, "broad"), ("moved", 8, "others")):
        to_target = random_sae().changed(W_dec=torch.ones(20, width), b_dec=torch.zeros(width))
        make_run(home, name, to_target, target=target)
    make_run(home, "half", random_sae(), complete=False)
    for name, sae, more in (
        ("first", steerable(d_in=128), {}),
        ("wide", steerable(), {}),
        ("deep", steerable(d_in=128), {"layer": 9}),
        ("odd", steerable(d_in=128), {"site": "../../etc"}),
        ("two", steerable(d_in=128), {"inputs": TWO}),
        ("backwards", steerable(d_in=128), {"target_layer": 0, "target_site": "resid_post"}),
    ):
        own = sae.with_widths((64, 64) if name == "two" else ())
        make_run(home, name, own, origin=READS | more)
    saecli.save_sae(steerable(d_in=128), home / "saved")
    saecli.save_sae(
        random_sae(d_in=128).changed(W_dec=torch.zeros(20, 64), b_dec=torch.zeros(64)),
        home / "across",
    )
    after_commands(home, *TRAINED)
    return home


ONE = "--latent 1 --scale 1 --prompt Return"
AT = "--layer 1 --site mlp_in"
# The command line, its exit status, and words of the sentence.
COMMANDS = [
    ("eval seed-0 --stability", 2, "--stability"),
    ("eval seed-0 other --stability", 2, "got runs trained on others and rows"),
    ("eval seed-0 thin --stability", 2, "expected 8 and 8 as seed-0 has, got 5 and 5 of thin"),
    ("eval seed-0 thick --stability", 2, "expected 8 and 8 as seed-0 has, got 8 and 16 of thick"),
    ("eval seed-0 moved --stability", 2, "got runs trained on rows and rows -> others"),
    ("eval seed-0 --tokens 5", 2, "--tokens does nothing without --model"),
    ("eval seed-0 --model tiny-gemma2", 1, "names no layer"),
    ("eval last --model tiny-gemma2", 1, "keeps no windows of tokens"),
    ("controls refit-run", 1, "expected a finished run of `sae train`"),
    ("controls half", 1, "expected a finished run of `sae train`"),
    ("controls from", 1, "without --init"),
    ("controls old", 1, "cannot make controls of old: "),
    ("controls {home}/saved", 1, "expected a finished run"),
    ("controls nowhere", 1, "nowhere"),
    ("controls run --tokens 5", 2, "--tokens"),
    ("controls run --model tiny-gemma2", 1, "expected a store that `sae extract` made"),
    ("refit run", 1, "there is a run named 'refit-run' already; give another --name"),
    ("refit run --name a/b", 2, "--name"),
    ("refit run --tokens 5", 2, "--tokens"),
    ("refit run --data narrow", 2, "--data"),
    ("refit run --data nowhere", 1, "nowhere"),
    ("refit nowhere", 1, "nowhere"),
    ("refit run --model tiny-gemma2 --name new", 1, "expected a store that `sae extract` made"),
    ("probe first --k 21", 2, "--k"),
    ("probe first --k 2 --k 2", 2, "--k"),
    ("probe first two", 2, "probing with two is not defined"),
    ("probe first wide", 2, "wide does not fit tiny-gemma2"),
    ("probe first --layer 2", 2, "--layer must be 1, as first says, got 2"),
    ("probe first --plot x.docx", 2, "--plot"),
    ("steer first --prompt a --latent 20 --scale 1", 2, "--latent must be from 0 to 19"),
    ("steer first --prompt a --latent -1 --scale 1", 2, "--latent must be from 0 to 19"),
    (f"steer first --latent 1 {ONE}", 2, "--latent must name each latent once, got 1, 1"),
    ("steer first --prompt a --latent 1", 2, "--scale is needed with --method add"),
    (f"steer first {ONE} --scale 2", 2, "--scale"),
    (
        "steer first --prompt a --latent 1 --scale nan",
        2,
        "--scale must be a finite number, got 'nan'",
    ),
    (f"steer first {ONE} --method ablate", 2, "--scale"),
    (f"steer first {ONE} --layer 2", 2, "--layer"),
    (f"steer first {ONE} --seed 7", 2, "--seed does nothing without --temperature"),
    (f"steer first {ONE} --max-new-tokens 200", 2, "--max-new-tokens must be at most 12"),
    (f"steer first {ONE} --prompt \udcff", 2, "--prompt must be in UTF-8 and not blank"),
    (f"steer backwards {ONE}", 2, "reads layer 1, resid_post after layer 0, resid_post"),
    (f"steer wide {ONE}", 2, "width, 128, got 16"),
    (f"steer deep {ONE}", 2, "--layer must be from 0 to 3"),
    (f"steer odd {ONE}", 2, "odd names an unknown site in its file: expected resid_post"),
    (f"steer two {ONE}", 2, "must choose one hook point of two"),
    (f"steer two {ONE} --method clamp", 2, "--method must be add with two"),
    (f"steer {{home}}/saved {ONE}", 2, "give --layer and"),
    (f"steer {{home}}/saved {ONE} {AT}", 2, "--model is needed: "),
    (f"steer {{home}}/across {ONE} {AT}", 2, "does not say what it pred"),
    (f"steer nowhere {ONE}", 1, "nowhere"),
    ("read first", 2, "expected one of --prompt, --text, --chat, got none"),
    ("read first --prompt a --text {home}/a.txt", 2, "got --prompt and --text"),
    ("read first --prompt ' '", 2, "the text must be in UTF-8 and not blank"),
    (f"steer first {ONE} --prompt '  '", 2, "--prompt must be in UTF-8 and not blank"),
    ("read first --prompt \udcff", 2, "in UTF-8"),
    ("read first --prompt a --compare ''", 2, "--compare must be in UTF-8 and not blank"),
    ("read first --prompt a --latent 20", 2, "must be from 0 to 19, the last of first, got 20"),
    ("read first --text {home}/none.txt", 2, "none.txt"),
    ("read first --text {home}/latin.txt", 2, "expected UTF-8; give a text itself by --prompt"),
    ("read first --text no.txt", 2, "no.txt: No such file or directory; expected UTF-8"),
    ("read first --chat {home}/a.txt", 2, "expected a JSON list of messages"),
    ("read first --chat {home}/chat.json", 1, "has no chat template"),
    ("read first --prompt a --html {home}/none/page.html", 2, "cannot write"),
    ("read wide --prompt a", 2, "does not fit"),
    ("read two --prompt a", 2, "two does not fit tiny-gemma2"),
    ("explain first --latent 20", 2, "must be from 0 to 19, the last of first, got 20"),
    ("explain first --latents 0", 2, "--latents"),
    ("explain first --labels {home}/a.txt --latents 3", 2, "--latents does nothing with --labels"),
    ("explain first --labels {home}/a.txt --data rows", 2, "--data does nothing with --labels"),
    (
        "explain first --labels {home}/a.txt --endpoint http://a --model-name b",
        2,
        "--endpoint does nothing with --labels",
    ),
    ("explain first --out {home}/none/labels.json", 2, "there is no folder"),
    ("explain old", 2, "rows keeps no tokens: expected a store"),
    ("explain old --data unnamed", 2, "does not say which model its tokens are of"),
]


@pytest.mark.parametrize(("line", "status", "said"), COMMANDS)
def test_exit_status_and_one_sentence(sae, home, line, status, said):
    before = sorted(path for path in home.rglob("*") if path.name != ".lock")
    done = replace(sae, home=home)(*shlex.split(line.format(home=home)))
    done.fails_in_one_sentence(status, said)
    assert sorted(path for path in home.rglob("*") if path.name != ".lock") == before


ANOTHER, NAN = random_sae(seed=1), random_sae().changed(W_dec=torch.full((20, 8), torch.nan))
HUGE = some_rows(100) * np.float32(1e25)
STEER: dict[str, Any] = {"sae": "first", "prompts": "a", "latents": 1}
# The function, its arguments, and words of the sentence.
FUNCTIONS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (
        saecli.evaluate,
        {"sae": "seed-0", "split": "other"},
        "split must be 'test', 'train' or 'all', got 'other'",
    ),
    (saecli.geometry, {"sae": "seed-0", "data": some_rows(50)}, "data must be a store"),
    (saecli.sparsity, {"sae": "seed-0", "data": some_rows(50, 9)}, "rows of 8 dimensions, got 9"),
    (saecli.sparsity, {"sae": "seed-0", "device": "tpu"}, "device"),
    (saecli.push, {"sae": "seed-0", "repo": "one"}, "cannot push to 'one': expected USER/REPO"),
    (saecli.push, {"sae": "my run", "repo": "a/b"}, "'my run' cannot be a folder on the hub"),
    (saecli.export, {"sae": "seed-0", "to": "other", "out": "x"}, "to must be one of saelens, "),
    (saecli.refit, {"sae": random_sae(), "data": HUGE}, "expected finite products"),
    (saecli.stability, {"saes": []}, "expected two or more, got none"),
    (
        saecli.stability,
        {"saes": [ANOTHER, NAN], "data": "rows"},
        "latents of sae: expected finite weights",
    ),
    (
        saecli.stability,
        {"saes": [ANOTHER] * 2, "data": "rows", "match_threshold": 1},
        "match_threshold",
    ),
    (saecli.probe, {"saes": "first", "rows": 10}, "rows must be at least 20, got 10"),
    (saecli.probe, {"saes": "first", "k": (0, 2)}, "k must be different numbers of at least 1"),
    (saecli.probe, {"saes": "first", "context": 0}, "context must be at least 1, got 0"),
    (saecli.probe, {"saes": ["first", "first"]}, "cannot probe first twice"),
    (saecli.steer, STEER | {"latents": []}, "latent must be from 0 to 19"),
    (saecli.steer, STEER | {"latents": 1.5}, "latent must be from 0 to 19"),
    (
        saecli.steer,
        STEER | {"method": "set"},
        "method must be 'add', 'clamp' or 'ablate', got 'set'",
    ),
    (saecli.steer, STEER | {"site": "resid"}, "site must be one of "),
]


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    FUNCTIONS,
    ids=[f"{function.__name__}: {said}" for function, _, said in FUNCTIONS],
)
def test_a_function_refuses_in_one_sentence(home: Path, function, arguments, said: str):
    with pytest.raises(saecli.SaeError) as refused:
        function(home=home, **arguments)
    assert said in str(refused.value)
