"""Training, resuming and all that a command does with an SAE on a simulated device, against the CPU; that no step waits
for it; `tests/cuda/run.sh` on a CPU: a part that fails or hangs spares the others."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated_gpu
import torch
from homes import same
from launching import captured
from simulated_gpu import dense  # noqa: F401
from solver_problems import ACTS, ROWS, SOLVERS, numbers
from solver_problems import trained_on as trained
from storing import make_store

import saecli
from saecli.base import devices
from saecli.measure.cosines import Alignment
from saecli.measure.evaluate import FeatureScores
from saecli.model.source import ModelSource
from saecli.sae.codes import Codes, SparseCodes
from saecli.store.opening import Joined
from saecli.store.options import SyntheticConfig
from saecli.store.values import DTYPES
from saecli.store.worlds import world_of
from saecli.train.descent import Adam
from saecli.train.solver import Solver

simulated_gpu.register()
GPU = simulated_gpu.NAME
LAYERS = (1, 2)
Stores = list[saecli.ActivationStore]
TOPK = {"act": "topk", "k": 3}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def stores(home: Path) -> Stores:
    options = {"rows": 1200, "home": home, "device": "cpu"}
    return [saecli.extract("tiny-gemma2", layer=n, name=f"layer-{n}", **options) for n in LAYERS]


@pytest.fixture(scope="module")
def run(home: Path, stores: Stores) -> Path:
    sae = saecli.fit(stores[0], act="topk", k=8, d_sae=64, epochs=1, device="cpu")
    saecli.save_sae(sae, home / "runs" / "one")
    return home / "runs" / "one"


def on_both(action: Callable[[str], Any]) -> tuple[Any, Any]:
    return action("cpu"), action(GPU)


def outside(folder: str, waits: Mapping[str, int]) -> dict[str, int]:
    """The waits in other folders of the package."""
    return {place: count for place, count in waits.items() if not place.startswith(folder)}


def assert_alike(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    ours, theirs = numbers(ours), numbers(theirs)
    assert len(ours) == len(theirs) > 3
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=1e-7)


TRAININGS: dict[str, dict[str, Any]] = {
    "prefixes, sgd": {"solver": "sgd", "act": "topk", "k": 3, "prefixes": "8,16"},
    "prefixes, pam-sgd": {"act": "relu", "prefixes": "auto"},
    "target": {"act": "topk", "k": 3, "of": "target"},
    "target with a skip": {"act": "batchtopk", "k": 3, "of": "target", "skip": True},
    "target with a skip, iterative": TOPK | {"of": "target", "skip": True, "solve": "iterative"},
    "crosscoder, sgd": {"solver": "sgd", "act": "relu", "of": "places"},
    "crosscoder, pam-sgd": {"act": "batchtopk", "k": 3, "of": "places"},
    "bf16": {"act": "relu", "precision": "bf16"},
    "target L0": {"act": "jumprelu", "target_l0": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAININGS)
def test_a_device_trains_as_the_cpu(case: str, stores: Stores, monkeypatch: pytest.MonkeyPatch):
    # Casts do their work without, only slower.
    monkeypatch.setattr(devices, "multiplies_bf16", lambda device: True)
    options = dict(TRAININGS[case])
    sources = {None: stores[0], "target": Joined((stores[0],), stores[1])}
    sources["places"] = Joined(tuple(stores))
    data = sources[options.pop("of", None)].split("train", fraction=0.5)
    solver, act = options.pop("solver", "pam-sgd"), options.pop("act")
    options = {"precision": "float32"} | options | {"batch_size": 256}
    ours, theirs = on_both(lambda device: trained(device, solver, act, options, rows=data)[0])
    # It rounds to bfloat16 what CPUs do not.
    rtol, atol = (0.03, 0.03) if case == "bf16" else (1e-5, 1e-6)
    for name, tensor in ours.tensors().items():
        there = theirs.tensors()[name]
        assert there.device.type == GPU
        torch.testing.assert_close(there.cpu(), tensor, rtol=rtol, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("model", [None, "tiny-gemma2"])
def test_an_sae_is_evaluated_as_on_the_cpu(model: str | None, run: Path, stores: Stores):
    options = {} if model is None else {"model": model, "tokens": 1500}
    # The CPU computes the bundled model in float32, a device in the checkpoint's bfloat16, whose rounding of
    # the logits is 2% of a KL of 2 on these 107 rows.
    both = on_both(lambda device: saecli.evaluate(run, stores[0], device=device, **options))
    assert_alike(*both, 1e-5 if model is None else 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["evaluate", "sparsity", "geometry"])
def test_an_sae_that_lies_on_a_device_is_measured(command: str, run: Path, stores: Stores):
    sae = saecli.load_sae(run)
    assert_alike(*on_both(lambda device: getattr(saecli, command)(sae.copy_to(device), stores[0])))
    if command == "sparsity":  # of an SAE that lies elsewhere
        assert_alike(*on_both(lambda device: saecli.sparsity(run, stores[0], device=device)))


@pytest.mark.slow
@pytest.mark.parametrize("target", [False, True])
def test_a_decoder_is_solved_for_as_on_the_cpu(target: bool, run: Path, stores: Stores):
    data = stores[0] if not target else saecli.join(stores[0], target=stores[1])
    sae = run if not target else saecli.fit(data, act="topk", k=8, d_sae=64, epochs=1, device="cpu")
    ours, theirs = on_both(lambda device: saecli.refit(sae, data, device=device))
    assert theirs.W_dec.device.type == GPU
    torch.testing.assert_close(theirs.W_dec.cpu(), ours.W_dec, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("model", [None, "tiny-gemma2"])
def test_pages_are_those_of_the_cpu(model, run, stores, tmp_path, monkeypatch):
    # By itself a device takes the checkpoint's bfloat16, and the CPU float32.
    monkeypatch.setattr(ModelSource, "dtype_on", lambda *_: "float32")

    def pages_of(device: str) -> dict[str, str]:
        saecli.report(run, tmp_path / device, stores[0], model=model, device=device)
        files = sorted((tmp_path / device).rglob("*.*"))
        return {path.name: path.read_text(encoding="utf-8") for path in files}

    ours, theirs = on_both(pages_of)
    assert ours == theirs and len(ours) >= 5


@pytest.mark.slow
def test_a_model_is_read_as_on_the_cpu_and_no_batch_waits(home: Path, stores: Stores):
    options = {"home": home, "device": GPU, "batch_size": 2, "model_dtype": "float32"}
    counts = []
    for rows in (600, 1200):
        with simulated_gpu.within(simulated_gpu.waits) as waits:
            name = f"gpu-{rows}"
            read = saecli.extract("tiny-gemma2", layer=LAYERS[0], rows=rows, name=name, **options)
        counts.append(outside("extract/", waits))
    assert counts[0] == counts[1]
    ours, theirs = (next(store.split("all").sequential(1200)) for store in (read, stores[0]))
    # Both are stored as bfloat16, in other batches.
    np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("measure", [saecli.evaluate, saecli.sparsity])
def test_measuring_a_store_does_not_wait_per_batch(run, stores, monkeypatch, measure):
    counts = []
    for rows in (64, 16):
        monkeypatch.setattr("saecli.measure.measured.BATCH_ROWS", rows)
        with simulated_gpu.within(simulated_gpu.waits) as waits:
            measure(run, stores[0], split="train", device=GPU)
        counts.append(waits)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("act", ["topk", "relu"])
@pytest.mark.parametrize("solve", ["direct", pytest.param("iterative", marks=pytest.mark.slow)])
def test_a_decoder_step_waits_a_few_times_whatever_its_rows(solve, act, monkeypatch):
    monkeypatch.setattr("saecli.train.rows.BLOCK_ROWS", 100)
    random, counts = np.random.default_rng(0), []
    options = {"d_sae": 24, "epochs": 1, "alpha": 1.0, "smoothing": 0, "solve": solve}
    if act == "topk":
        options["k"] = 2
    for rows in (600, 2400):
        x = random.standard_normal((rows, 12)).astype(np.float32)
        with simulated_gpu.within(simulated_gpu.waits) as waits:
            trained(GPU, "pam-sgd", act, options | {"batch_size": rows}, rows=x)
        counts.append(outside("train/ridge/", waits))
        of_ridge = waits.total() - sum(counts[-1].values())
    assert counts[0] == counts[1]
    assert solve == "iterative" or of_ridge < 100  # as many as iterations, otherwise


@pytest.mark.parametrize("density", [0.05, 0.5])
def test_few_codes_of_a_device_are_kept_as_entries(density: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()  # what keeps them dense
    codes = torch.rand(20, 30, generator=torch.Generator().manual_seed(0))
    codes *= codes < density
    found = Codes(codes.to(GPU)).compact()
    assert isinstance(found, SparseCodes) == (density < 0.1)
    assert torch.equal(found.dense().cpu(), codes)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_trains_on_a_store_as_the_cpu(tmp_path: Path, dtype: str):
    rows = make_store(tmp_path / "store", np.concatenate([ROWS, ROWS[::-1]]), dtype).split("train")
    options = {"d_sae": 16, "epochs": 2, "batch_size": 100}
    ours, theirs = on_both(lambda device: trained(device, "pam-sgd", "relu", options, rows=rows)[0])
    assert same(ours, theirs.copy_to("cpu"))


CASES = {(solver, act): True for solver in range(len(SOLVERS)) for act in range(len(ACTS))}
CASES |= dict.fromkeys([(0, 5), (2, 7), (3, 0), (4, 5)], False)  # those that are not long


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver, act",
    [
        pytest.param(SOLVERS[solver], ACTS[act], marks=[pytest.mark.long] if long else [])
        for (solver, act), long in CASES.items()
    ],
    ids=str,
)
def test_a_device_trains_and_resumes_as_the_cpu(solver: tuple, act: tuple) -> None:
    options = act[1] | solver[1]
    # Gram matrices of codes that are sparse by kind are added row by row on a CPU, on a device by dense products.
    sums = solver[0] != "sgd" and {"solve", "d_sae"}.isdisjoint(solver[1])
    rounding = 0.0
    if sums and act[0] in ("topk", "abs-topk", "matching-pursuit"):
        options["dtype"], rounding = "float64", 1e-12
    on_cpu, _ = trained("cpu", solver[0], act[0], options)
    with simulated_gpu.within(simulated_gpu.unordered) as unordered:
        on_gpu, kept = trained("gpu", solver[0], act[0], options)
    assert unordered == {}  # so that CUDA gives the same bits again
    resumed, _ = trained("gpu", solver[0], act[0], options, kept)
    for name, tensor in on_cpu.tensors().items():
        assert on_gpu.tensors()[name].device.type == "gpu"
        there = on_gpu.tensors()[name].cpu()
        torch.testing.assert_close(there, tensor, rtol=rounding, atol=rounding)
        assert torch.equal(resumed.tensors()[name].cpu(), there), name


@pytest.mark.slow
def test_a_device_resumes_what_began_from_an_sae() -> None:
    began = saecli.fit(ROWS, act="relu", d_sae=32, epochs=1, device="cpu")
    whole, kept = trained("gpu", "sgd", "relu", {}, init=began)
    resumed, _ = trained("gpu", "sgd", "relu", {}, kept, init=began)
    assert same(resumed.copy_to("cpu"), whole.copy_to("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["sgd", "pam-sgd"])
@pytest.mark.parametrize("act, options", ACTS, ids=str)
def test_a_step_does_not_wait_for_the_device(solver, act, options, monkeypatch):
    counts, descend = [], Solver.descend

    def counted(self, batch):
        with simulated_gpu.within(simulated_gpu.waits) as waits:
            report = descend(self, batch)
        counts.append(dict(waits))
        return report

    monkeypatch.setattr(Solver, "descend", counted)
    trained("gpu", solver, act, options)
    assert not any(counts[2:])


def test_what_follows_a_revival_does_not_wait_for_the_device() -> None:
    tensors = {"W_enc": torch.ones(4, 6, device="gpu", requires_grad=True)}
    adam, dead = Adam(tensors), torch.tensor([True, False] * 3).to("gpu")
    (tensors["W_enc"] * torch.arange(6.0, device="gpu")).sum().backward()
    adam.step(0.1)
    with simulated_gpu.within(simulated_gpu.waits) as waits:
        adam.forget(dead, ~dead, {"W_enc": 1}.get)
    assert waits == {}
    state = adam.state()
    average, square = (state[f"adam.{name}.W_enc"].cpu() for name in ("exp_avg", "exp_avg_sq"))
    first, second = 0.9, 0.99
    expected = (1 - first) * torch.tensor([0.0, 1, 0, 3, 0, 5])
    torch.testing.assert_close(average[0], expected)
    mean = (1 - second) * (1 + 9 + 25) / 3
    torch.testing.assert_close(square[0, ::2], torch.full((3,), mean))


@pytest.mark.parametrize("act", ["relu", "topk"])
def test_known_features_are_scored_on_a_device_as_on_the_cpu(act: str) -> None:
    world = world_of(SyntheticConfig(features=40, d_in=ROWS.shape[1], l0=4))
    truth = world.codes(0, 0)[:600]
    sae, _ = trained("cpu", "sgd", act, {})
    results = []
    for device in ("cpu", "gpu"):
        mine = sae.copy_to(device)
        scores = FeatureScores(Alignment.of(mine.W_dec, torch.from_numpy(world.directions)), device)
        x = torch.from_numpy(world.rows(truth)).to(device)
        for begin in (0, 300):
            scores.update(mine.codes(x[begin : begin + 300]), truth[begin : begin + 300])
        results.append(scores.result())
    assert results[0] == pytest.approx(results[1], abs=1e-12)
    assert results[0]["f1"] > 0


def test_the_device_refuses_what_cuda_refuses() -> None:
    here, there = torch.ones(3, device="gpu"), torch.ones(3)
    for wrong in (
        lambda: here + there,
        lambda: there[here.long()],
        lambda: here.numpy(),
        lambda: torch.multinomial(here, 1, generator=torch.Generator()),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()
    assert (here + torch.tensor(1.0)).device.type == "gpu"


def test_a_planted_wait_mix_and_unordered_sum_are_named_by_line() -> None:
    lines = (
        "wait = lambda x: x.sum().item()\nmix = lambda x, y: x @ y\nsum_up = lambda x: x.cumsum(0)"
    )
    planted: dict = {}
    exec(compile(lines, f"{simulated_gpu.PACKAGE}/solvers/planted.py", "exec"), planted)
    there = torch.ones(3, 3, device="gpu")
    with simulated_gpu.within(simulated_gpu.waits) as waits:
        assert planted["wait"](there) == 9
    assert waits == {"solvers/planted.py:1": 1}
    with pytest.raises(RuntimeError, match=r"CPU tensors .* at solvers/planted\.py:2"):
        planted["mix"](there, torch.ones(3, 3))
    with simulated_gpu.within(simulated_gpu.unordered) as unordered:
        planted["sum_up"](there)
        planted["sum_up"](there.long())
        there.scatter_add(1, torch.arange(3, device="gpu").expand(3, 3), there)
    assert unordered == {"solvers/planted.py:3": 1}


ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT, ROOT / "tests", ROOT / "tests" / "benchmarks", ROOT / "tests" / "cuda"]
LONG = {"correctness", "processes", "extraction", "rows"}  # which the whole script runs
sys.path.append(str(FOLDERS[-1]))
day = importlib.import_module("day")


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, FOLDERS)))


def assert_found(figures: dict[str, Any]) -> None:
    assert "FAILED" not in figures and len(figures) > 1
    assert "OTHER BITS" not in figures.values()
    assert figures["seconds"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(day.PARTS.keys() - LONG))
def test_a_part_finds_figures(importable, tmp_path: Path, part: str):
    assert_found(day.in_process(part, day.Day("cpu", tmp_path), day.PARTS[part][1]))


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_is_told(importable, tmp_path: Path, monkeypatch):
    assert "Error: " in day.run_part("machine", None)["FAILED"]
    on_cpu = day.Day("cpu", tmp_path)
    assert day.in_process("machine", on_cpu, 0.2)["FAILED"] == "took longer than 0 s"
    monkeypatch.setenv("PYTHONPATH", "")
    assert "ModuleNotFoundError" in day.in_process("steps", on_cpu, 60)["FAILED"]


@pytest.mark.long
@pytest.mark.slow
def test_the_script_runs_all_parts(tmp_path: Path):
    done = captured(
        [ROOT / "tests" / "cuda" / "run.sh", tmp_path / "out", "--device", "cpu"],
        env={**os.environ, "PYTHON": sys.executable},
    )
    found = json.loads((tmp_path / "out" / "cuda.json").read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stderr
    assert [*found] == [*day.PARTS]
    for figures in found.values():
        assert_found(figures)
    table = (tmp_path / "out" / "cuda.md").read_text(encoding="utf-8")
    assert table.count("\n| ") == sum(map(len, found.values())) > 50
