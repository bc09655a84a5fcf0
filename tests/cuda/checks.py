"""Whether a GPU computes what a CPU does, and the same bits each time."""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from day import Day, Figures
from solver_problems import ACTS, SOLVERS, numbers
from solver_problems import trained_on as trained

import saecli
from saecli.sae.activations import Relu
from saecli.store.opening import Joined

FAR = 1e-6  # relative, in float64, above which a difference is no rounding
ITERATIVE = 1e-3  # the same where the decoder is solved to a residual of 1e-4
LAYERS, ROWS = (1, 2), 3000


def correctness(day: Day) -> Figures:
    """Trainings in float64, and commands, on the device against the CPU."""
    far: dict[str, str] = {}
    cases = (
        list(itertools.product(SOLVERS, ACTS))
        if day.full
        else list(itertools.product(SOLVERS[:3], ACTS[:4]))
    )
    for (solver, of_solver), (act, of_act) in cases:
        _compare(far, f"{solver} {of_solver} {act} {of_act}", day, solver, act, of_act | of_solver)
    with tempfile.TemporaryDirectory() as home:
        stores = [_extracted(home, f"layer-{layer}", layer) for layer in LAYERS]
        target, places = Joined((stores[0],), stores[1]), Joined(tuple(stores))
        topk = {"k": 8, "d_sae": 64, "batch_size": 512}
        for name, data, act, options in (
            ("prefixes", stores[0], "topk", topk | {"prefixes": "auto"}),
            ("target", target, "topk", topk),
            ("target, skip", target, "batchtopk", topk | {"skip": True}),
            ("crosscoder", places, "batchtopk", topk),
        ):
            _compare(far, name, day, "pam-sgd", act, options, data.split("train"))
        sae = saecli.fit(stores[0], act="topk", k=8, d_sae=64, epochs=1, device="cpu")
        devices = ("cpu", day.device)
        found = {
            command.__name__: [
                numbers(command(sae.copy_to(device), stores[0])) for device in devices
            ]
            for command in (saecli.evaluate, saecli.sparsity, saecli.geometry)
        }
        found["refit"] = [
            saecli.refit(sae, stores[0], device=device).W_dec.cpu().numpy() for device in devices
        ]
        extracted = _extracted(home, "device", LAYERS[0], day.device)
        both = (stores[0], extracted)
        found["extract"] = [next(store.split("all").sequential(ROWS)) for store in both]
        for name, pair in found.items():
            stored = name == "extract"  # as bfloat16
            relative, absolute = (0.02, 0.05) if stored else (1e-4, 1e-5)
            if not np.allclose(*pair, rtol=relative, atol=absolute):
                far[name] = f"{np.abs(np.subtract(*pair)).max():.2g} apart"
    if far:
        raise AssertionError(f"not as on the CPU: {json.dumps(far)}")
    return {
        "trainings in float64 as on the CPU": len(cases) + 4,
        "commands as on the CPU": len(found),
    }


def _extracted(home: str, name: str, layer: int, device: str = "cpu") -> saecli.ActivationStore:
    options = {"name": name, "home": home, "device": device, "model_dtype": "float32"}
    return saecli.extract("tiny-gemma2", layer=layer, rows=ROWS, **options)


def _compare(
    far: dict[str, str],
    name: str,
    day: Day,
    solver: str,
    act: str,
    options: dict[str, Any],
    rows: Any = None,
) -> None:
    """Note a training that differs between the device and the CPU, or fails."""
    given = {} if rows is None else {"rows": rows}
    options = options | {"dtype": "float64"}
    try:
        ours, theirs = (
            trained(device, solver, act, options, **given)[0] for device in (day.device, "cpu")
        )
    except Exception as error:  # all cases are named at once
        far[name] = f"{type(error).__name__}: {error}"[:200]
        return
    worst = max(
        ((ours.tensors()[key].cpu() - tensor).norm() / tensor.norm().clamp(min=1e-30)).item()
        for key, tensor in theirs.tensors().items()
    )
    if not worst < (ITERATIVE if options.get("solve") == "iterative" else FAR):
        far[name] = f"{worst:.2g} apart"


def repeats(day: Day) -> Figures:
    """Whether a training has the same bits again, and resumed from its first epoch."""
    found: Figures = {}
    for solver, act in itertools.product(("sgd", "pam-sgd"), ("relu", "topk", "batchtopk")):
        options = {} if act == "relu" else {"k": 3}
        whole, kept = trained(day.device, solver, act, options)
        for what, start in (("again", None), ("resumed", kept)):
            other, _ = trained(day.device, solver, act, options, start)
            same = all(
                torch.equal(one, other.tensors()[name]) for name, one in whole.tensors().items()
            )
            found[f"{solver} {act}, {what}"] = "the same bits" if same else "OTHER BITS"
    return found


def processes(day: Day) -> Figures:
    """Two processes, over NCCL if there are as many GPUs, else over gloo on the CPU, against one."""
    both = day.full and torch.cuda.device_count() > 1
    device = "cuda" if both else "cpu"
    with tempfile.TemporaryDirectory() as home:
        _extracted(home, "rows", LAYERS[0])
        words = (
            f"--home {home} train --data rows --act relu --d-sae 64 --epochs 2 --dtype float64 --device {device} "
            "--json"
        ).split()
        for name, launch in (
            ("one", []),
            ("two", ["-m", "torch.distributed.run", "--nproc-per-node", "2"]),
        ):
            subprocess.run(
                [sys.executable, *launch, "-m", "saecli", *words, "--name", name],
                check=True,
                stdout=subprocess.DEVNULL,
            )
        one, two = (saecli.load_sae(Path(home) / "runs" / name) for name in ("one", "two"))
    assert isinstance(one.activation, Relu)
    apart = ((one.W_dec - two.W_dec).norm() / one.W_dec.norm()).item()
    if not apart < FAR:
        raise AssertionError(f"two processes train another SAE than one: {apart:.2g} apart")
    return {"two processes": "NCCL" if both else "gloo, on the CPU", "apart from one": apart}
