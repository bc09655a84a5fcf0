"""Stability across seeds: matchings against brute force over permutations, copies whose matching is known, and
`sae eval --stability`."""

from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, D, F, make_run, make_store, random_sae, some_rows

import saecli
from saecli.base.errors import ConfigError
from saecli.measure.stability import matching
from saecli.sae.activations import Relu
from saecli.sae.dictionary import SAE


def sae_of(W_dec: torch.Tensor, b_enc: torch.Tensor | None = None) -> SAE:
    """A tied SAE of these decoder vectors (F, D)."""
    b_enc = torch.zeros(len(W_dec)) if b_enc is None else b_enc
    return SAE(W_dec.T, b_enc, W_dec, torch.zeros(W_dec.shape[1]), Relu())


def vectors(latents: int, seed: int, d_in: int = 6) -> torch.Tensor:
    return torch.randn(latents, d_in, generator=torch.Generator().manual_seed(seed))


def stability(saes: list[SAE], **options: Any) -> dict[str, Any]:
    """The stability of SAEs, by rows on which some of their latents fire."""
    return saecli.stability(saes, some_rows(200, saes[0].d_in), **options)


def cosines(one: torch.Tensor, other: torch.Tensor) -> np.ndarray:
    unit, other_unit = (w.double() / w.double().norm(dim=1, keepdim=True) for w in (one, other))
    return (unit @ other_unit.T).numpy()


@pytest.mark.parametrize(("latents", "others"), [(1, 1), (1, 4), (6, 6), (4, 7), (7, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_the_matching_is_the_best_of_all_permutations(latents: int, others: int, seed: int) -> None:
    one, other = sae_of(vectors(latents, seed)), sae_of(vectors(others, seed + 100))
    table = np.abs(cosines(one.W_dec, other.W_dec))
    small = table if latents <= others else table.T
    best = max(
        sum(small[range(len(small)), chosen])
        for chosen in permutations(range(small.shape[1]), len(small))
    )
    found = matching(one, other)
    assert found.similarity.sum() == pytest.approx(best, abs=1e-6)
    np.testing.assert_allclose(found.similarity, table[found.first, found.second], atol=1e-12)
    assert len(set(found.first)) == len(set(found.second)) == len(small)
    assert list(found.first) == sorted(found.first)


@pytest.mark.parametrize("blocks", [1, 3, 1024])
def test_permuted_flipped_and_rescaled_copies_match_to_the_permutation(blocks: int, monkeypatch):
    monkeypatch.setattr("saecli.measure.cosines.COST_ROWS", blocks)
    one = sae_of(vectors(10, 0))
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    sign = torch.tensor([1.0, -1.0] * 5).unsqueeze(1)
    W = one.W_dec[order] * sign
    for scale in (1.0, 3.0):
        (pair,) = stability([one, sae_of(W * scale)])["pairs"]
        assert pair["counterparts"] == torch.argsort(order).tolist()
        assert pair["latents"] == 10
        assert pair["pw_mcc"] == pytest.approx(1) and pair["matched_fraction"] == 1


def kept(latents: int, fresh: int) -> SAE:
    """Eight orthonormal latents, the first of them those of all such SAEs, the others axes from `fresh` on."""
    return sae_of(torch.eye(48)[[*range(latents), *range(fresh, fresh + 8 - latents)]])


def test_matched_fractions_are_those_that_the_runs_were_made_with() -> None:
    found = stability([kept(8, 0), kept(4, 8), kept(2, 16)])
    for measure in ("matched_fraction", "pw_mcc"):
        assert [pair[measure] for pair in found["pairs"]] == [0.5, 0.25, 0.25]
        assert found[measure] == pytest.approx(1 / 3)
    first = found["runs"][0]
    assert first["cosine"] == first["match_fraction"] == [1, 1, 0.5, 0.5, 0, 0, 0, 0]


def test_a_latent_is_matched_above_the_threshold_and_not_at_it() -> None:
    saes = [sae_of(torch.tensor([[1.0, 0.0]])), sae_of(torch.tensor([[3.0, 4.0]]))]
    cosine = stability(saes)["pw_mcc"]
    assert cosine == pytest.approx(0.6)
    found = [stability(saes, match_threshold=one) for one in (cosine, 0.59, 0.61)]
    assert [one["matched_fraction"] for one in found] == [0, 1, 0]


def test_saes_of_different_width_are_matched_over_the_narrower() -> None:
    wide = sae_of(vectors(9, 0))
    narrow = sae_of(wide.W_dec[[7, 2, 5]])
    for saes in ([wide, narrow], [narrow, wide]):
        found = stability(saes)
        (pair,) = found["pairs"]
        assert (pair["latents"], pair["pw_mcc"]) == (3, pytest.approx(1))
        assert pair["counterparts"] == (
            [None, None, 1, None, None, 2, None, 0, None] if saes[0] is wide else [7, 2, 5]
        )
        of_wide = found["runs"][saes.index(wide)]
        cosines_of_wide = np.array(of_wide["cosine"], np.float64)
        assert np.flatnonzero(~np.isnan(cosines_of_wide)).tolist() == [2, 5, 7]


def test_a_decoder_vector_of_length_zero_has_cosine_zero() -> None:
    W = vectors(4, 0)
    W[1] = 0
    assert stability([sae_of(W), sae_of(W.clone())])["pw_mcc"] == pytest.approx(0.75)


def test_silent_latents_are_matched_but_not_counted_as_firing() -> None:
    W, dead = vectors(6, 0, d_in=D), torch.tensor([100.0] * 4 + [-1e9] * 2)
    other = W.clone()
    other[3:] = vectors(3, 1, d_in=D)
    bare = stability([sae_of(W), sae_of(other)])
    found = saecli.stability([sae_of(W, b_enc=dead), sae_of(other, b_enc=dead)], some_rows(200))
    assert found["pw_mcc"] == bare["pw_mcc"]
    (pair,) = found["pairs"]
    fires = [latent for latent in range(4) if pair["counterparts"][latent] < 4]
    table = np.abs(cosines(W, other))
    assert pair["firing"]["latents"] == len(fires)
    expected = np.mean([table[latent, pair["counterparts"][latent]] for latent in fires])
    assert pair["firing"]["pw_mcc"] == pytest.approx(expected)
    assert [run["silent"] for run in found["runs"]] == [2, 2]
    silent = sae_of(W, b_enc=torch.full((6,), -1e9))
    all_silent = saecli.stability([silent, sae_of(other, b_enc=dead)], some_rows(200))
    assert all_silent["firing"]["pw_mcc"] is None


def test_frequencies_are_those_of_sparsity() -> None:
    saes = [random_sae(seed=seed) for seed in range(2)]
    for one, run in zip(saes, saecli.stability(saes, some_rows(500))["runs"], strict=True):
        assert run["frequency"] == saecli.sparsity(one, some_rows(500))["frequency"]


@pytest.fixture
def runs(sae: CommandLine) -> CommandLine:
    make_store(sae.home, "rows", some_rows())
    for seed in range(3):  # with latents that all fire
        make_run(sae.home, f"seed-{seed}", random_sae(seed=seed).changed(b_enc=torch.ones(F)))
    return sae


NAMES = ("seed-0", "seed-1", "seed-2")


def test_the_command_prints_the_functions_result(runs: CommandLine, tmp_path: Path) -> None:
    bare = runs("eval", *NAMES, "--json").json
    options = ("--stability", "--plot", tmp_path / "x.png")
    done = runs("eval", *NAMES, *options, "--json")
    assert list(done.json) == ["runs", "stability"]
    assert done.json["runs"] == bare["runs"]
    expected = saecli.stability(NAMES, home=runs.home)
    assert done.json["stability"] == expected
    pairs = [pair["runs"] for pair in expected["pairs"]]
    assert pairs == [list(pair) for pair in combinations(NAMES, 2)]
    assert [run["d_sae"] for run in expected["runs"]] == [F] * 3
    assert {path.name for path in tmp_path.glob("*.png")} == {"x.png", "x-stability.png"}


def test_the_table_has_firing_latents_if_some_are_silent(runs: CommandLine):
    shown = runs("eval", *NAMES, "--stability")
    mean = saecli.stability(NAMES, home=runs.home)["pw_mcc"]
    (line,) = (line for line in shown.out.splitlines() if "all pairs" in line)
    assert f"{mean:.4g}" in line and "firing" not in shown.out
    silent = random_sae(seed=0)
    make_run(runs.home, "silent", silent.changed(b_enc=torch.full((F,), -1e9)))
    assert "firing" in runs("eval", "seed-0", "silent", "--stability").out


def test_matching_by_codes_is_the_best_of_correlations(tmp_path: Path) -> None:
    """Against numpy's correlations and all permutations; sparse codes too."""
    x = some_rows(300, 6)
    for one, other in (
        (sae_of(vectors(4, 0)), sae_of(vectors(6, 1))),
        (sae_of(vectors(6, 2)), sae_of(vectors(4, 3))),
    ):
        z, w = (np.maximum(x.astype(float) @ sae.W_enc.double().numpy(), 0) for sae in (one, other))
        table = np.corrcoef(z.T, w.T)[: z.shape[1], z.shape[1] :]
        small = table if len(table) <= table.shape[1] else table.T
        best = max(
            sum(small[range(len(small)), chosen])
            for chosen in permutations(range(small.shape[1]), len(small))
        )
        found = saecli.stability([one, other], x, match_by="codes")
        (pair,) = found["pairs"]
        assert pair["pw_mcc"] == pytest.approx(best / 4, abs=1e-5)
        matched = found["runs"][0]["correlation"]
        for latent, counterpart in enumerate(pair["counterparts"]):
            if counterpart is not None:
                assert matched[latent] == pytest.approx(table[latent, counterpart], abs=1e-5)


def test_latents_of_equal_codes_and_other_decoders_match_by_codes_alone() -> None:
    """A latent that never fires correlates with none."""
    one = sae_of(vectors(6, 0), b_enc=torch.tensor([0.0] * 5 + [-1e9]))
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    other = SAE(one.W_enc[:, order], one.b_enc[order], vectors(6, 5), torch.zeros(6), Relu())
    found = stability([one, other], match_by="codes")
    (pair,) = found["pairs"]
    assert [pair["counterparts"][i] for i in range(5)] == torch.argsort(order)[:5].tolist()
    assert [pair[name] for name in ("pw_mcc", "matched_fraction")] == pytest.approx([5 / 6] * 2)
    assert stability([one, other])["matched_fraction"] <= 0.5
    with pytest.raises(ConfigError, match="--match-by must be one of decoder, codes, got 'rows'"):
        stability([one, other], match_by="rows")


def test_the_command_matches_by_codes(runs: CommandLine, tmp_path: Path) -> None:
    options = ("--stability", "--match-by", "codes")
    done = runs("eval", *NAMES, *options, "--plot", tmp_path / "x.png", "--json")
    assert done.json["stability"] == saecli.stability(NAMES, home=runs.home, match_by="codes")
    assert "matched: correlation of codes above 0.7" in runs("eval", *NAMES, *options).out
    runs("eval", *NAMES, *options[1:]).fails(2, "--match-by does nothing without --stability")
