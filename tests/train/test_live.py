"""Rows that come to the trainer: `sae train --model`, from a model through memory; to a device as stored, and kept
there, against those that a CPU reads."""

import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine, activation_of, change_json, same, some_rows
from launching import signalled
from storing import collect, make_store

from saecli.base.console import Silent
from saecli.base.devices import batches_on
from saecli.base.errors import ConfigError, ModelError
from saecli.base.home import Home
from saecli.extract.extraction import Streamed, open_stream
from saecli.extract.options import ExtractConfig
from saecli.extract.plan import Selection
from saecli.sae.activations import ACTIVATIONS
from saecli.sae.dictionary import SAE
from saecli.store.reader import ActivationStore, Rows
from saecli.store.schema import StoreMeta
from saecli.store.split import WHOLE, Part, Split, is_test
from saecli.store.values import DTYPES
from saecli.train import SOLVERS
from saecli.train.live import LIVE_WINDOW_BYTES, LiveRows
from saecli.train.options import Pam, TrainingConfig
from saecli.train.plan import Plan
from saecli.train.rows import ArrayRows, Normalisation, TrainingRows
from saecli.train.training import Record, start_training

D = 6
TRAIN = ("train", "--model", "tiny-gemma2", "--layer", "2")


def live_rows(
    rows: np.ndarray,
    documents: np.ndarray,
    cuts: list[int],
    wanted: int,
    least: int,
    window: int | None = None,
    from_sae: bool = False,
    error: Exception | None = None,
) -> LiveRows:
    """Training rows of a model that gives rows in blocks, and then fails with an error if there is one; `window`: rows
    of one."""
    meta = StoreMeta({}, request_hash="", dtype="float32", d_in=rows.shape[1], shard_rows=1000)

    def blocks(show) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for part in np.split(np.arange(len(rows)), cuts):
            show(len(part), len(part))
            yield rows[part], documents[part]
        if error is not None:
            raise error

    source = Streamed("some-model-l0", meta, {}, blocks)
    window_bytes = LIVE_WINDOW_BYTES if window is None else window * 4 * rows.shape[1]
    return LiveRows(source, wanted, 0, least, Silent(), window_bytes, from_sae)


def of_documents(rows: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and the documents that they are of, four each."""
    x = np.random.default_rng(0).normal(size=(rows, D)).astype(np.float32)
    return x, np.arange(rows) // 4


def planned(train, test, solver: str, act: str, **options) -> Plan:
    config = TrainingConfig(d_sae=16, **options)
    return Plan.resolve(train, test, config, SOLVERS[solver](), activation_of(act, k=2))


def trained(plan: Plan) -> SAE:
    return start_training(plan, Record()).train()


@pytest.mark.parametrize("window", [260, 700, 5000])
def test_every_training_row_comes_once_in_an_order_independent_of_blocks(window: int):
    rows, documents = of_documents()
    expected = rows[~is_test(documents)][:2000]
    orders = []
    for cuts in ([], [1, 400, 401, 2990], list(range(7, 3000, 7))):
        with live_rows(rows, documents, cuts, 2000, 100, window) as live:
            orders.append(np.concatenate(list(live.batches(50, seed=3, epoch=0))))
            assert live.rows == 2000 and not live.ended_early and live.ready <= 2 * max(window, 200)
    for order in orders:
        assert np.array_equal(order, orders[0])
    assert not np.array_equal(orders[0], expected)
    assert np.array_equal(orders[0][np.lexsort(orders[0].T)], expected[np.lexsort(expected.T)])


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("act", ["relu", "topk", "batchtopk"])
def test_one_window_trains_bit_for_bit_as_its_rows_in_an_array(solver: str, act: str):
    rows, documents = of_documents()
    with live_rows(rows, documents, [900], 2000, 300) as live:
        streamed = trained(planned(live, live.test_rows, solver, act))
    stored = ArrayRows(rows[~is_test(documents)][:2000])
    assert same(streamed, trained(planned(stored, None, solver, act, epochs=1)))


class InOrder(ArrayRows):
    """Rows that are trained on in the order in which they lie."""

    def batches(
        self, batch_size: int, *, seed: int, epoch: int, part: Part = WHOLE, first: int = 0
    ) -> Iterator[np.ndarray]:
        return self.sequential(batch_size)


def test_several_windows_train_bit_for_bit_as_stored_rows():
    rows = (*of_documents(9000), [900, 5000], 7500, 1200, 2500)
    with live_rows(*rows) as live:
        assert live.ready == 2500
        in_order = InOrder(np.concatenate(list(live.batches(256, seed=0, epoch=0))))
    with live_rows(*rows) as live:
        streamed = trained(planned(live, live.test_rows, "sgd", "topk", normalize="none"))
    stored = trained(planned(in_order, None, "sgd", "topk", normalize="none", epochs=1))
    assert same(streamed, stored)


def test_decoder_steps_take_rows_of_the_last_two_windows():
    rows, documents = of_documents(9000)
    with live_rows(rows, documents, [], 7500, 1200, 2500) as live:
        for _ in live.batches(250, seed=0, epoch=0):
            at_hand = np.concatenate(list(live.batches(300, seed=0, epoch=7)))
            assert len(at_hand) == live.ready <= 5000
        trained = rows[~is_test(documents)][:7500]
        assert {row.tobytes() for row in at_hand} == {row.tobytes() for row in trained[2500:]}


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["sgd", "pam-sgd"])
def test_a_text_that_ends_in_a_later_window_is_trained_to_its_end(solver: str):
    rows, documents = of_documents(9000)
    there = int((~is_test(documents)).sum())
    with live_rows(rows, documents, [900, 5000], 20_000, 1200, 2500) as live:
        training = start_training(planned(live, live.test_rows, solver, "topk"), Record())
        result = training.result(training.train())
    assert result["rows_train"] == there > result["rows_counted"]
    assert result["steps"] < training.plan.steps
    assert result["warnings"][0] == (
        f"the text ended after {there:,} of 20,000 training rows, before the learning rate had fallen; use --rows "
        f"{there}, or a longer text"
    )


@pytest.mark.parametrize("alpha", ["auto", 30.0])
def test_where_a_text_ends_early_the_sae_is_as_good_as_of_just_those_rows(alpha: float | str):
    rng, wide, latents = np.random.default_rng(0), 16, 256
    codes = rng.exponential(size=(7000, 100)) * (rng.random((7000, 100)) < 0.03)
    rows = (codes @ rng.normal(size=(100, wide))).astype(np.float32)
    _, documents = of_documents(len(rows))
    there = int((~is_test(documents)).sum())
    solver, found = SOLVERS["pam-sgd"](alpha=alpha), []
    for wanted in (round(there / 0.8), there):
        with live_rows(rows, documents, [900, 5000], wanted, 2200, 4000) as live:
            # The rate is the same to the end.
            config = TrainingConfig(d_sae=latents, batch_size=100, lr=0.03, lr_decay=0.0)
            activation = activation_of("topk", k=4)
            plan = Plan.resolve(live, live.test_rows, config, solver, activation)
            training = start_training(plan, Record())
            found.append(training.result(training.train()) | {"planned": plan.steps})
    early, whole = found
    assert early["steps"] == whole["steps"] == whole["planned"] < early["planned"]
    assert early["final"]["test_fvu"] == pytest.approx(whole["final"]["test_fvu"], rel=0.03)
    assert early["final"]["alpha"] == pytest.approx(whole["final"]["alpha"], rel=0.1)
    assert early["final"]["revived"] == 0  # latents that no step follows


@pytest.mark.parametrize("solver", ["sgd", "pam-sgd"])
def test_where_a_text_ends_early_thresholds_are_those_of_its_rows(solver: str):
    with live_rows(*of_documents(9000), [900, 5000], 20_000, 1200, 2500) as live:
        training = start_training(planned(live, live.test_rows, solver, "batchtopk"), Record())
        training.train()
    assert live.ended_early
    codes = training.solver.dictionary.codes(training.rows.sample.x)
    assert codes.count() == 2 * codes.shape[0]


def test_more_rows_than_there_are_come_once():
    x = np.arange(5000, dtype=np.float32)[:, None]
    one = torch.ones(1)
    rows = TrainingRows(ArrayRows(x), Normalisation(0 * one, one, one, 1), 64, 0)
    found = torch.cat([batch.x for batch in rows.some(6000, 3)])
    assert sorted(found[:, 0].tolist()) == list(range(5000))


def test_test_rows_are_the_first_held_out_rows():
    rows, documents = of_documents()
    with live_rows(rows, documents, [1500], 1000, 100) as live:
        (tested,) = live.test_rows.sequential(10_000)
    assert np.array_equal(tested, rows[:1500][is_test(documents[:1500])])
    number, of_training = np.arange(3000), np.flatnonzero(~is_test(np.arange(9)))[0]
    late = np.where(number < 2000, of_training, number)
    with live_rows(rows, late, [500, 2100, 2500], 300, 100) as live:
        (tested,), (trained,) = live.test_rows.sequential(10_000), live.sequential(10_000)
    assert np.array_equal(tested, rows[500:2100][is_test(late[500:2100])])
    assert np.array_equal(trained, rows[:300])
    few = np.arange(40) // 20
    assert not is_test(few).any()
    said = "expected training rows and held-out ones, got 40 and 0"
    with pytest.raises(ConfigError, match=said), live_rows(rows[:40], few, [], 1000, 100):
        pass


def test_rows_kept_out_of_training_on_are_those_that_a_store_keeps_out():
    rows, documents = of_documents()
    kept_out = Split("train", 0.9, rest=True).keeps(documents)
    with live_rows(rows, documents, [1500], 1000, 100, from_sae=True) as live:
        (compared,), (trained,), (tested,) = (
            part.sequential(10_000) for part in (live.kept_out, live, live.test_rows)
        )
    assert np.array_equal(compared, rows[:1500][kept_out[:1500]])
    assert np.array_equal(tested, rows[:1500][is_test(documents[:1500])])
    assert np.array_equal(trained, rows[~kept_out & ~is_test(documents)][:1000])
    only = np.full(3000, np.flatnonzero(~is_test(np.arange(9)))[0])
    only[-500:] = np.flatnonzero(is_test(np.arange(99)))[0]
    with live_rows(rows, only, [1500], 1000, 100, from_sae=True) as live:
        assert live.kept_out is None


def test_an_error_of_the_model_is_raised_and_leaving_ends_the_thread():
    rows, documents = of_documents(9000)
    failing, cuts = ModelError("the network failed"), list(range(500, 9000, 500))
    with (
        live_rows(rows, documents, cuts, 20_000, 1200, 2500, error=failing) as live,
        pytest.raises(ModelError, match="the network failed"),
    ):
        trained(planned(live, live.test_rows, "sgd", "relu"))
    many, cuts = (np.tile(rows, (50, 1)), np.tile(documents, 50)), list(range(64, 450_000, 64))
    with live_rows(*many, cuts, 400_000, 1200, 2500):
        assert any(thread.name.startswith("sae-ahead") for thread in threading.enumerate())
    assert not any(thread.name.startswith("sae-ahead") for thread in threading.enumerate())


@pytest.mark.slow
def test_rows_of_a_model_are_the_training_rows_of_its_store(sae: CommandLine):
    files = (sae.home / "notes.txt", sae.home / "more.txt")
    sae.home.mkdir(exist_ok=True)
    for file in files:
        texts = [f"{file.stem} number {number}, about {number**2}." for number in range(180)]
        file.write_text("\n\n".join(texts))
    options = {"model": "tiny-gemma2", "dataset": tuple(map(str, files)), "rows": 1500}
    stream, _ = open_stream(
        ExtractConfig(**options),
        given=options.keys(),
        selection=Selection.at(1, "mlp_out"),
        device="cpu",
        home=Home(sae.home),
        listener=Silent(),
    )
    with LiveRows(stream, 1000, 0, 100, Silent()) as live:
        (found,), tested = live.sequential(10_000), live.test_rows
    words = f"extract --model tiny-gemma2 --layer 1 --site mlp_out --rows {options['rows']} --json"
    document = sae(words, "--dataset", files[0], "--dataset", files[1]).json
    assert [*document["sources"].values()] == pytest.approx([750, 750], rel=0.05)
    store = ActivationStore.open(Path(document["path"]))
    assert store.name == stream.name and store.meta.source == stream.meta.source
    (train,), (test,) = (store.split(which).sequential(10_000) for which in ("train", "test"))
    np.testing.assert_allclose(found, train[:1000], rtol=0.02, atol=0.05)  # batches of other shapes
    (held_out,) = tested.sequential(10_000)
    np.testing.assert_allclose(held_out, test[: len(held_out)], rtol=0.02, atol=0.05)
    assert len(held_out) > 20


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_run_without_a_store_repeats_by_its_config_and_is_evaluated(sae, solver):
    quick = "--rows 1500 --site mlp_out --act topk --k 4 --d-sae 48 --name first --json".split()
    first = sae(*TRAIN, *quick, "--solver", solver).json
    assert (first["rows_train"], first["epochs"]) == (1500, 1) and first["rows_test"] > 50
    assert not (sae.home / "activations").exists()
    config = sae.home / "runs" / "first" / "config.toml"
    again = sae("train --name again --json --config", config).json
    fvu = first["final"]["test_fvu"]
    assert again["final"]["test_fvu"] == pytest.approx(fvu, rel=1e-3)  # the model ran twice
    refused = sae("eval", "first").err
    assert "--data is needed: first was trained on rows that were not stored" in refused
    command = refused.split("`")[1]
    sae(*shlex.split(command)[1:])
    (measured,) = sae("eval", "first", "--json").json["runs"]
    assert measured["fvu"] == pytest.approx(fvu, rel=0.2)
    change_json(config.with_name("run.json"), complete=False)
    refused = sae("train", "--resume", "--name", "first").err
    assert "cannot go on with first: its rows came from a model" in refused
    sae("train --resume").fails(1, "there is no unfinished run")


def test_decoder_steps_over_all_rows_need_them_in_memory():
    with (
        live_rows(*of_documents(9000), [900], 7500, 1200, 2500) as live,
        pytest.raises(ConfigError, match="needs all rows in memory, at most 2,500"),
    ):
        Plan.resolve(live, live.test_rows, TrainingConfig(), Pam(), ACTIVATIONS["relu"]())


@pytest.mark.long
def test_a_stopped_training_without_a_store_leaves_nothing(sae: CommandLine, tmp_path: Path):
    text = tmp_path / "long.txt"
    texts = [f"Some text, number {number}, of a few words more.\n\n" for number in range(100_000)]
    text.write_text("".join(texts))
    words = [*TRAIN, "--dataset", text, "--rows", 1_000_000, "--d-sae", 64, "--name", "x"]
    process = signalled(sae.home, words, "x/run.json", 1, signal.SIGINT)
    assert process.returncode == 130
    assert process.said.endswith("stopped before the first checkpoint; nothing was saved of x\n")
    assert "there is no unfinished run" in sae("train", "--resume").err


def shuffled_and_in_order(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    return collect(rows.batches(64, seed=1, epoch=2)), collect(rows.sequential(64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_as_stored_have_the_bits_on_disk_in_the_same_order(tmp_path: Path, dtype: str):
    x, documents = some_rows(700, 12), np.arange(700) // 10
    store = make_store(tmp_path / "store", x, dtype, documents=documents, shard_rows=300)
    rows = store.split("train", fraction=0.6)
    stored, decode = rows.as_stored(), DTYPES[dtype]
    shuffled, in_order = shuffled_and_in_order(rows)
    for got, expected in zip(shuffled_and_in_order(stored), (shuffled, in_order), strict=True):
        out = np.empty(got.shape, np.float32)
        decode.decode_rows(got, out)
        assert got.dtype == decode.storage
        assert np.array_equal(out, expected)
    carried = batches_on(stored.batches(64, seed=1, epoch=2), torch.device("cpu"))
    batches = [batch.float().clone() for batch in carried]
    assert np.array_equal(torch.cat(batches).numpy(), shuffled)
