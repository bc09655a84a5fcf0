"""Documents that anyone may have edited: whatever stands in them, a sentence says so, and nothing waits."""

import json
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from homes import (
    MLP,
    CommandLine,
    activation_of,
    change_json,
    make_run,
    make_store,
    random_sae,
    sae_for,
    some_rows,
    with_origin,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from saecli.base.errors import SaeError
from saecli.base.files import parse_json
from saecli.sae.activations import ACTIVATIONS
from saecli.sae.formats import FORMATS, load, save
from saecli.store.origin import HookPoint, ModelName, Origin


@pytest.mark.parametrize(
    ("dataset", "kept"),
    [
        ("Salesforce/wikitext", "Salesforce/wikitext"),
        ("stdlib-docs", "stdlib-docs"),
        ("/home/me/acme.jsonl", "acme.jsonl"),
        ("/home/me/a b.txt + o/wiki + ~/c.txt", "a b.txt + o/wiki + c.txt"),
        ("C:\\Users\\me\\acme.jsonl", "acme.jsonl"),
        ("../clients/acme/", "acme"),
        ("clients/acme/2026.jsonl", "2026.jsonl"),
        ("/\n/home/me/x", "x"),
    ],
)
def test_of_a_path_only_its_last_part_is_published(dataset: str, kept: str):
    read = (HookPoint(3, "resid_post"), HookPoint(3, "resid_post", 1))
    origin = Origin((ModelName(dataset), ModelName("gpt2")), read, dataset=dataset, data="mine")
    entries = origin.published().to_json()
    assert entries["dataset"] == entries["model"] == entries["inputs"][0]["model"] == kept
    assert "data" not in entries and entries["inputs"][1]["model"] == "gpt2"


ODD = (None, True, 0, -1, 10**400, 1e308, "x", "", [], [[]], {}, {"a": 1})
DEEP = "[" * 100_000


def edits(document: Any, path: tuple = ()) -> Iterator[tuple]:
    """The places of a JSON document, the whole among them, at which something else can stand."""
    yield path
    entries = dict(enumerate(document)) if isinstance(document, list) else document
    for key, value in entries.items() if isinstance(entries, dict) else ():
        yield from edits(value, (*path, key))


def edited(document: Any, path: tuple, value: Any) -> Any:
    if not path:
        return value
    changed = deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if value is deleted:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


def deleted():
    """Stands for a field that is not there."""


def try_each_edit(
    text: str, write: Callable[[str], None], use: Callable[[], Any]
) -> tuple[int, int]:
    """Put each odd value at each place in turn; returns how many were taken and how many refused by a sentence."""
    document, taken, refused = json.loads(text), 0, 0
    texts = [
        json.dumps(edited(document, path, value))
        for path in edits(document)
        for value in (*ODD, *([deleted] if path else []))
    ]
    for changed in [*texts, "", "{", DEEP, '{"a":' * 100_000, "9" * 10_000, "\x00"]:
        write(changed)
        try:
            use()
            taken += 1
        except SaeError as error:
            assert "\n" not in str(error)
            refused += 1
    write(text)
    use()
    return taken, refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "config", "transcodes"),
    [
        ("saelens", "cfg.json", False),
        ("saelens", "cfg.json", True),
        ("sparsify", "cfg.json", False),
        ("sparsify", "cfg.json", True),
        ("dictionary-learning", "config.json", False),  # it has no transcoders
        ("circuit-tracer", "config.yaml", False),
        ("circuit-tracer", "config.yaml", True),
    ],
)
def test_a_changed_configuration_is_read_or_refused(tmp_path, format, config, transcodes):
    saved = sae_for(format, "relu-topk", "jumprelu")
    saved = with_origin(saved.sae, MLP) if transcodes else saved
    assert not FORMATS[format].lacks(saved)
    save(saved, format, tmp_path / "sae")
    path = tmp_path / "sae" / config
    document = json.dumps(yaml.safe_load(path.read_text()))  # JSON is YAML too
    taken, refused = try_each_edit(document, path.write_text, lambda: load(tmp_path / "sae"))
    assert taken and refused > 10


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_a_native_header_with_an_entry_changed_is_read_or_refused(tmp_path: Path, act: str):
    saved = with_origin(random_sae(activation_of(act)), {"model": "gpt2", "layer": 3})
    save(saved, "native", tmp_path / "sae")
    path = tmp_path / "sae" / "sae.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()["saecli"]
    taken, refused = try_each_edit(
        header,
        lambda text: save_file(tensors, path, {"saecli": text}),
        lambda: load(tmp_path / "sae"),
    )
    assert taken and refused > 20


@pytest.mark.slow
@pytest.mark.parametrize("command", ["list", "eval", "report"])
def test_a_run_json_with_any_entry_changed_is_read_or_refused(sae, tmp_path, command):
    make_store(sae.home, "rows", some_rows(40))
    path = make_run(sae.home, "run", random_sae()) / "run.json"
    words = [command] if command == "list" else [command, "run"]
    words += ["--out", tmp_path / "pages", "--latents", "1"] if command == "report" else []

    def use():
        shutil.rmtree(tmp_path / "pages", ignore_errors=True)
        done = sae(*words)
        assert done.status in (0, 1) and "sae: unexpected" not in done.err, done.err
        if done.status:
            raise SaeError(done.err.splitlines()[-1])

    change_json(path, data_hash="x", result={"final": {"test_fvu": 0.5}})
    taken, refused = try_each_edit(path.read_text(), path.write_text, use)
    assert taken and (refused > 40) == (command != "list")


def unfinished_run(sae: CommandLine) -> Path:
    """A run that was trained for an epoch, marked as unfinished."""
    make_store(sae.home, "rows", some_rows(60))
    words = ("--d-sae", "12", "--act", "topk", "--k", "2", "--batch-size", "60", "--epochs", "1")
    assert sae("train", "--name", "run", *words).status == 0
    path = sae.home / "runs" / "run" / "run.json"
    change_json(path, complete=False, result=None)
    return path.parent


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_to_resume_with_a_setting_changed_is_no_bug(sae: CommandLine, every: int):
    folder = unfinished_run(sae)
    path = folder / "run.json"
    document = json.loads(path.read_text())
    files = [folder / name for name in ("checkpoint.safetensors", "sae.safetensors")]
    contents = [file.read_bytes() for file in files]
    places = [place for place in edits(document) if place]
    changes = [(place, value) for place in places for value in (None, "x", -1, [], deleted)]
    for place, value in changes[::every]:
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        path.write_text(json.dumps(edited(document, place, value)))
        done = sae("train", "--resume", "--name", "run")
        said = f"{place}, {value}: {done.err}"
        assert done.status in (0, 1, 2) and "sae: unexpected" not in done.err, said


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("dictionary.W_enc"),
        lambda tensors: tensors.update({"dictionary.b_enc": torch.zeros(1)}),
        lambda tensors: tensors.update({"adam.exp_avg.W_enc": torch.zeros(1)}),
        lambda tensors: tensors.update({"normalisation.mean": torch.zeros(1)}),
    ],
)
def test_a_checkpoint_of_other_shapes_is_refused_and_not_stretched(sae, change):
    path = unfinished_run(sae) / "checkpoint.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    change(tensors)
    save_file(tensors, path, metadata)
    sae("train", "--resume", "--name", "run").fails(
        1, "cannot go on from a checkpoint of another training: expected"
    )
    assert path.exists()


def test_what_is_wrong_is_named_by_its_place_in_the_document():
    with pytest.raises(ValueError, match=r"^a\.1: expected a valid integer, got '3'$"):
        parse_json('{"a": [1, "3"]}', dict[str, list[int]])
    with pytest.raises(ValueError, match=r"^expected an object, got \[\]$"):
        parse_json("[]", dict[str, int])
    with pytest.raises(ValueError, match=r"^Invalid JSON: EOF while parsing an object at line 1"):
        parse_json(b"{", dict[str, int])
