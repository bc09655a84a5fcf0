"""Training, resuming and measuring on a simulated device: nothing is on the wrong side, and steps do not wait."""

import itertools

import pytest
import simulated_gpu
import torch
from simulated_gpu import dense  # noqa: F401
from solver_problems import ACTS, ROWS, SOLVERS
from solver_problems import trained_on as trained

from saecli.measure.worlds import Alignment, FeatureScores
from saecli.sae.metrics import firing, reconstruction
from saecli.store.options import SyntheticConfig
from saecli.store.worlds import world_of
from saecli.train.solver import Adam, Solver

simulated_gpu.register()
CASES = [case for case in itertools.product(SOLVERS, ACTS)  # soft-topk's small products take long here
         if case[1][0] != "soft-topk" or (case[0][1].get("solve") != "iterative" and case[0][1].get("d_sae", 0) < 100)]
QUICK = {(0, 3), (2, 5), (3, 0), (4, 3)}  # of solvers and activations, by number
CASES = [case if (SOLVERS.index(case[0]), ACTS.index(case[1])) in QUICK else pytest.param(*case, marks=pytest.mark.long)
         for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("solver, act", CASES, ids=str)
def test_a_device_trains_and_resumes_as_the_cpu(solver: tuple, act: tuple) -> None:
    options = act[1] | solver[1]
    on_cpu, _ = trained("cpu", solver[0], act[0], options)
    with simulated_gpu.unordered_within() as unordered:
        on_gpu, kept = trained("gpu", solver[0], act[0], options)
    assert unordered == {}  # so that CUDA gives the same bits again
    again, _ = trained("gpu", solver[0], act[0], options, kept)
    for name, tensor in on_cpu.tensors().items():
        assert on_gpu.tensors()[name].device.type == "gpu"
        assert torch.equal(on_gpu.tensors()[name].cpu(), tensor), name
        assert torch.equal(again.tensors()[name].cpu(), tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["sgd", "pam-sgd"])
@pytest.mark.parametrize("act, options", ACTS[:-1], ids=str)
def test_a_step_does_not_wait_for_the_device(solver: str, act: str, options: dict,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    found, descend = [], Solver.descend

    def counted(self, batch):
        with simulated_gpu.waits_within() as waits:
            report = descend(self, batch)
        found.append(dict(waits))
        return report

    monkeypatch.setattr(Solver, "descend", counted)
    trained("gpu", solver, act, options | {"inner_steps": 1} if solver == "pam-sgd" else options)
    assert found[2:] == [{}] * len(found[2:])


def test_what_follows_a_revival_does_not_wait_for_the_device() -> None:
    tensors = {"W_enc": torch.ones(4, 6, device="gpu", requires_grad=True)}
    adam, dead = Adam(tensors), torch.tensor([True, False] * 3).to("gpu")
    (tensors["W_enc"] * torch.arange(6.0, device="gpu")).sum().backward()
    adam.step(0.1)
    with simulated_gpu.waits_within() as waits:
        adam.forget(dead, {"W_enc": 1}.get)
        adam.rescale(dict.fromkeys(adam.tensors, 2.0))
    assert waits == {}
    state = adam.state()
    torch.testing.assert_close(state["adam.exp_avg.W_enc"].cpu()[0], torch.tensor([0, 0.05, 0, 0.15, 0, 0.25]))
    mean = 1e-3 * (1 + 9 + 25) / 3 / 4
    torch.testing.assert_close(state["adam.exp_avg_sq.W_enc"].cpu()[0, ::2], torch.full((3,), mean))


def test_measuring_does_not_wait_for_the_device() -> None:
    sae, _ = trained("gpu", "sgd", "topk", {"k": 3})
    batches = list(torch.from_numpy(ROWS).to("gpu").split(50))
    for measure in (reconstruction, firing):
        with simulated_gpu.waits_within() as few:
            measure(sae, batches[:2])
        with simulated_gpu.waits_within() as many:
            measure(sae, batches)
        assert few == many


@pytest.mark.parametrize("act", ["relu", "topk"])
def test_known_features_are_scored_on_a_device_as_on_the_cpu(act: str) -> None:
    world = world_of(SyntheticConfig(features=40, d_in=ROWS.shape[1], l0=4))
    truth = world.codes(0, 0)[:600]
    sae, _ = trained("cpu", "sgd", act, {})
    found = []
    for device in ("cpu", "gpu"):
        mine = sae.copy_to(device)
        scores = FeatureScores(Alignment.of(mine.W_dec, torch.from_numpy(world.directions)), device)
        x = torch.from_numpy(world.rows(truth)).to(device)
        for begin in (0, 300):
            scores.update(mine.codes(x[begin : begin + 300]), truth[begin : begin + 300])
        found.append(scores.result())
    assert found[0] == pytest.approx(found[1], abs=1e-12)
    assert found[0]["f1"] > 0


def test_the_device_refuses_what_cuda_refuses() -> None:
    here, there = torch.ones(3, device="gpu"), torch.ones(3)
    for wrong in (lambda: here + there, lambda: there[here.long()], lambda: here.numpy(),
                  lambda: torch.multinomial(here, 1, generator=torch.Generator())):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()
    assert (here + torch.tensor(1.0)).device.type == "gpu"


def test_a_planted_wait_mix_and_unordered_sum_are_named_by_line() -> None:
    planted: dict = {}
    exec(compile("def wait(x):\n    return x.sum().item()\n\ndef mix(x, y):\n    return x @ y\n\n"
                 "def sum_up(x):\n    return x.cumsum(0)\n",
                 f"{simulated_gpu.PACKAGE}/solvers/planted.py", "exec"), planted)
    there = torch.ones(3, 3, device="gpu")
    with simulated_gpu.waits_within() as found:
        assert planted["wait"](there) == 9
    assert found == {"solvers/planted.py:2": 1}
    with pytest.raises(RuntimeError, match=r"CPU tensors .* at solvers/planted\.py:5"):
        planted["mix"](there, torch.ones(3, 3))
    with simulated_gpu.unordered_within() as found:
        planted["sum_up"](there)
        planted["sum_up"](there.long())
        there.scatter_add(1, torch.arange(3, device="gpu").expand(3, 3), there)
    assert found == {"solvers/planted.py:8": 1}
