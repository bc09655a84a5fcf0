"""The command line as a whole: help, imports, exit statuses, Ctrl-C at any moment, completion in shells; and what
commands refuse, in one sentence. Options and statuses are a contract."""

import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from homes import CommandLine, Done, make_run, make_store, random_sae, some_rows
from launching import captured

from saecli import __version__
from saecli.cli.main import COMMANDS, load_command, main, sentence_for, summary


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_option_and_help_all_the_advanced(sae: CommandLine, name: str):
    sae.monkeypatch.setenv("COLUMNS", "400")
    params = load_command(name).params
    hidden = [param for param in params if param.hidden]
    pages = [sae(name, "--help"), *([sae(name, "--help-all")] if hidden else [])]
    assert [(page.status, page.err) for page in pages] == [(0, "")] * len(pages)
    assert "--json" in [flag for param in params for flag in param.opts]
    for param in params:
        assert param.help.endswith((".", ")"))
        words = " ".join(param.help.split())[:90]
        assert words in pages[-1].out
        assert (words in pages[0].out) == (param not in hidden)
    assert (f"--help-all shows {len(hidden)} more options" in pages[0].out) == bool(hidden)


def test_the_help_of_extract_begins_with_the_place_and_is_whole_in_80_columns(sae: CommandLine):
    sae.monkeypatch.setenv("COLUMNS", "80")
    page = sae("extract", "--help").out
    flags = re.findall(r"^│ (--[a-z-]+)", page, re.MULTILINE)
    assert flags[:4] == ["--model", "--layer", "--site", "--module"]
    assert "…" not in page
    for words in ("blocks.L.hook_resid_post", "wikitext-103-raw-v1", "<all|int>..."):
        assert words in page
    words = " ".join(re.findall(r"^│.* {2}(\S.*?) +│$", page, re.MULTILINE))
    for choices in ("resid_pre", "assistant", "One of float32, float16, bfloat16."):
        assert choices in words


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_the_whole_docstring_after_the_summary_of_the_list(sae: CommandLine, name: str):
    sae.monkeypatch.setenv("COLUMNS", "4000")  # paragraphs stay on one line
    module = importlib.import_module(f"saecli.cli.{'import_' if name == 'import' else name}")
    docstring = inspect.getdoc(module)
    assert docstring.splitlines()[0] == summary(name)
    page = sae(name, "--help").out
    for paragraph in docstring.split("\n\n"):
        assert " ".join(paragraph.split()) in page


@pytest.mark.parametrize("name", COMMANDS)
def test_every_page_has_one_example_that_the_command_takes(name: str):
    command = load_command(name)
    (example,) = re.findall(r"Example: (sae .*)$", command.help, re.MULTILINE)
    program, named, *words = shlex.split(example)
    assert (program, named) == ("sae", name)
    command.make_context(name, words)  # exits where an option is unknown or its value cannot be


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        *([name, "--help"] for name in COMMANDS),
        ["train", "--help-all"],
        ["train", "--d-sae", "x"],
        ["list"],
    ],
)
def test_quick_commands_import_neither_torch_nor_transformers(tmp_path: Path, words: list[str]):
    slow = {"torch", "transformers"} | ({"numpy"} if words != ["list"] else set())
    script = (
        "import sys; from saecli.cli.main import main\n"
        f"sys.argv = ['sae', '--home', {str(tmp_path)!r}, *{words!r}]\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"sys.exit(', '.join({slow} & sys.modules.keys()) or 0)"
    )
    captured([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_names_that_the_encoding_lacks_are_printed_escaped(tmp_path: Path):
    make_run(tmp_path, "ä日", random_sae())
    for words, status in ((["list"], 0), (["eval", "ä日\u202e\33"], 1)):
        done = subprocess.run(
            [sys.executable, "-m", "saecli", "--home", tmp_path, *words],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            check=False,
        )
        assert done.returncode == status
        assert b"\\u65e5" in done.stdout + done.stderr
        assert b"\33" not in done.stderr and b"Traceback" not in done.stderr


def test_an_unexpected_error_is_named_as_a_bug(sae: CommandLine, monkeypatch):
    make_store(sae.home, "rows", some_rows(300))
    monkeypatch.setattr("saecli.store.opening.open_joined", lambda *_: 1 / 0)
    done = sae("train")
    assert (done.status, done.out) == (1, "")
    said = "sae: unexpected ZeroDivisionError: division by zero; SAE_DEBUG=1 shows where"
    assert done.err.startswith(said) and done.err.count("\n") == 1
    monkeypatch.setenv("SAE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        sae("train")


@pytest.mark.slow
def test_the_home_is_the_options_else_the_environments(sae, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "SAE_HOME"}

    def home_named(*words: str, **extra: str) -> str:
        done = captured(
            [sys.executable, "-m", "saecli", *words, "list"],
            env={**environment, "PYTHONPATH": str(Path(__file__).parents[2]), **extra},
        )
        return (done.stdout + done.stderr).split(" holds nothing yet")[0]

    assert home_named() == "sae-data"
    assert home_named(SAE_HOME="b") == "b"
    assert home_named("--home", "a", SAE_HOME="b") == "a"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory: the machine refused an allocation"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory: the GPU refused"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "out of memory: the GPU"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory: the machine"),
        (OSError(12, "Cannot allocate memory"), "out of memory: the machine refused"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (RuntimeError("Expected memory format contiguous"), None),
        (KeyError("x"), None),
        (OSError(28, "No space left on device", "/x/y"), "the disk is full, writing /x/y"),
        (ImportError("no module named x"), None),
    ],
)
def test_a_full_disk_or_memory_is_told_in_a_sentence(error: Exception, said: str | None):
    sentence = sentence_for(error)
    assert sentence is None if said is None else sentence.startswith(said)


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sae tr", ["train"]),
        ("sae train --so", ["--solver"]),
        ("sae train --solver ", ["sgd", "pam-sgd", "pam"]),
        ("sae train --alpha ", ["auto"]),
        ("sae extract --site res", ["resid_post", "resid_pre", "resid_mid"]),
        ("sae eval ", []),
        ("sae eval run --st", ["--stability"]),
    ],
)
def test_commands_options_and_their_choices(sae: CommandLine, line: str, words: list[str]):
    asked = {
        "_SAE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - (not line.endswith(" "))),
    }  # what a bash sets
    for name, value in asked.items():
        sae.monkeypatch.setenv(name, value)
    sae.monkeypatch.setattr(sys, "argv", ["sae"])
    with pytest.raises(SystemExit) as stop:
        main()
    said = sae.capsys.readouterr()
    assert (stop.value.code or 0, said.err, said.out.split()) == (0, "", words)


def test_bash_completes_with_the_script_it_is_given(tmp_path: Path):
    script = tmp_path / "sae"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m saecli "$@"\n')
    script.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    program = (
        'eval "$(sae --show-completion bash)"\ncomplete -p sae\nCOMP_WORDS=(sae e)\nCOMP_CWORD=1\n'
        '_sae_completion sae\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = captured(["bash", "--norc", "-c", program], check=True, env=environment)
    assert done.stderr == ""
    words = ["extract", "eval", "explain", "effects", "export"]
    assert done.stdout.splitlines() == ["complete -o default -F _sae_completion sae", *words]


PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell that runs the tests has set
from saecli.__main__ import main

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["sae", "--home", {home!r}, "train", "--d-sae", "12", "--epochs", "1", "--name", "run"]
main()
"""


@pytest.mark.parametrize(
    "module",
    [
        "saecli.cli.main",
        "typer",
        "torch",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("rich", "numpy", "torch.nn", "safetensors", "matplotlib.figure")
        ),
    ],
)
def test_while_libraries_are_loaded(tmp_path: Path, module: str):
    make_store(tmp_path, "rows", some_rows(60))
    done = captured([sys.executable, "-c", PROGRAM.format(module=module, home=str(tmp_path))])
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr and "unexpected" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["sae", "list"], 1, "sae: saecli needs Linux, macOS or another POSIX system, got "),
        (["notebook"], 1, "ImportError: saecli needs Linux, macOS or another POSIX system, got "),
    ],
)
def test_a_system_that_is_not_posix_is_refused_in_one_sentence(argv, status, said):
    """One without `fcntl`, as on Windows; the command has no traceback."""
    code = f"import sys; sys.modules['fcntl'] = None; sys.argv = {argv}; import saecli"
    done = captured([sys.executable, "-c", code])
    assert done.returncode == status and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(said)
    assert done.stderr.endswith("; on Windows, install it in WSL\n")
    assert ("Traceback" in done.stderr) == (argv[0] != "sae")


@pytest.mark.parametrize(("allowed", "most", "then"), [(256, 9000, 4096), (256, 300, 300)])
def test_the_command_may_open_more_files_than_a_shell_allows_at_first(allowed, most, then):
    """A sweep holds a lock for each run."""
    code = (
        f"import resource as r, sys; r.setrlimit(r.RLIMIT_NOFILE, ({allowed}, {most}))\n"
        "from saecli.__main__ import main; sys.argv = ['sae', '--version']\n"
        "try: main()\nfinally: print(r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    said = captured([sys.executable, "-c", code]).stdout
    assert said == f"sae {__version__}\n{then}\n"


# Command lines and a word of the sentence, by exit status. LAST is the last word of the line.
WRONG = [
    ("no-such", "LAST"),
    ("train --no-such", "LAST"),
    ("train --alpha many", "--alpha"),
    ("train --d-sae x", "--d-sae"),
    ("train --model tiny-gemma2 --layer 1 --layer=2", "one value in sae train, got 1, 2"),
    ("train --model tiny-gemma2 --layer all", "--layer takes one value in sae train, got all"),
    ("train --act reul", "--act"),
    ("train --each", "--data"),
    ("train --each --data rows --target rows", "got layers [None] and [None]"),
    ("train --each --resume", "--each"),
    ("train --config nowhere.toml", "LAST"),
    ("train --config folder.png", "LAST"),
    ("extract --layer al", "--layer"),
    ("extract --site resid-pre", "did you mean resid_pre?"),
    ("eval run --device toaster", "LAST"),
    ("eval run --data wide", "--data"),
    ("eval x --plot file.png/a.png", "LAST"),
    ("sparsity run --plot picture.docx", "--plot"),
    ("sparsity x --plot folder.png", "LAST"),
    ("geometry run --slice 0,1,2", "--plot"),
    ("geometry run --slice 0,1 --plot x.png", "--slice"),
    ("geometry run --slice 0,1,9999 --plot x.png", "9999"),
    ("geometry run --plot x.gif", "--plot"),
    ("geometry run both --plot x.png", "--plot"),
    ("geometry x --plot new/a.png", "LAST"),
    ("export run --to onnx --out out", "--to"),
    ("export run --to saelens --out folder.png", "LAST"),
    ("export run --to saelens --out file.png/out", "there is no folder file.png"),
    ("import digits --shard-rows 0", "--shard-rows"),
    ("import digits --shard-rows 4294967296", "--shard-rows"),
    ("import digits --l0 3", "--l0"),
    ("import synthetic --key x", "--key"),
    (
        "import synthetic --features 10 --l0 5",
        "--l0 must be at most 0.4 times --features, 4, got 5",
    ),
    ("import synthetic --correlation 1", "--correlation"),
    ("report run --out out --latent 3 --latent 20", "20"),
    ("report run --out out --latent 0 --latents 3", "--latents"),
    ("report run --out out --neuronpedia javascript:x", "LAST"),
    ("report run --out out --neuronpedia a/b/../c", "LAST"),
    ("report x --out folder.png", "LAST"),
    ("rm both --yes", "--kind"),
    ("rm rows", "--yes"),
]
FAILED = [
    ("train --each --data r*z", "`sae list` shows every"),
    ("eval n*", "`sae list` shows every run"),
    ("eval nosuch", "`sae list` shows every run"),
    ("eval run --data nosuch", "`sae list` shows every"),
    ("geometry no-such-run", "LAST"),
    ("import nowhere.npy", "LAST"),
    ("import digits --key x", "--key"),
    ("report run --out out --data none", "LAST"),
    ("rm rows --kind run --yes", "rows"),
    ("rm ../runs/run --yes", "../runs/run"),
    ("rm rows rnu --yes", "did you mean run?"),
]
# The text of --config, further words, and words of the sentence.
CONFIGS = [
    ('d_sae = "many"', "", "--d-sae must be a valid integer, got 'many'"),
    ("d_sae = []", "", "d_sae"),
    ("epochs = [1, 2]", "", "epochs"),
    ("epochs = 1979-05-27", "", "--epochs"),
    ("dsae = 3", "", "did you mean d_sae?"),
    ("xyzzy = 3", "", "xyzzy"),
    ("[train]\nk = 3", "", "train"),
    ("act: topk", "", "expected TOML"),
    ("act = " + "[" * 5000, "", "cannot read"),
    ("d_sae = " + "9" * 5000, "", "cannot "),
    ('name = "a\\u0000b"', "", "--name"),
    ("\0", "", "cannot read"),
    ("tied = true", "", "--tied"),
    ('act = "topk"\nk = 9', "--act relu", "--k"),
    ('act = "topk"\nk = 9', "--d-sae 8", "--k"),
    ("steps = 3", "--epochs 3", "--steps"),
    ("k = 3", "--resume", "--config does nothing with --resume"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a home and other things in it, none of which a refused command changes."""
    folder = tmp_path_factory.mktemp("refusals")
    for name, d_in in (("wide", 9), ("both", 8), ("rows", 8)):
        make_store(folder / "home", name, some_rows(300, d_in))
    for name in ("both", "run"):
        make_run(folder / "home", name, random_sae())
    (folder / "file.png").touch()
    (folder / "folder.png" / "mine").mkdir(parents=True)
    return folder


def refused(sae: CommandLine, folder: Path, *words: str | Path) -> Done:
    """What is left of a command that may change nothing."""
    sae.monkeypatch.chdir(folder)
    sae.monkeypatch.setattr("sys.stdin", io.StringIO())
    before = sorted(path for path in folder.rglob("*") if path.name != ".lock")
    done = replace(sae, home=folder / "home")(*words)
    assert sorted(path for path in folder.rglob("*") if path.name != ".lock") == before
    return done


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [(line, 2, said) for line, said in WRONG] + [(line, 1, said) for line, said in FAILED],
)
def test_status_and_one_sentence(sae: CommandLine, folder: Path, line: str, status: int, said: str):
    said = line.split()[-1] if said == "LAST" else said
    refused(sae, folder, *line.split()).fails_in_one_sentence(status, said)


@pytest.mark.parametrize(("text", "words", "said"), CONFIGS, ids=lambda value: str(value)[:30])
def test_what_is_wrong_in_a_config_is_told_with_its_name(sae, folder, tmp_path, text, words, said):
    config = tmp_path / "run.toml"
    config.write_text(text)
    done = refused(sae, folder, "train", "--config", config, *words.split())
    done.fails_in_one_sentence(2, said, str(config))
    assert done.err.splitlines()[-1].startswith("sae: ")
