"""SAE formats against the formulas of the libraries that own them, in numpy float64."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from saecli.base.errors import FormatError
from saecli.sae.activations import (
    ACTIVATIONS,
    AbsTopK,
    Activation,
    BatchTopK,
    JumpRelu,
    Relu,
    ReluTopK,
    SoftTopK,
    Swish,
    TopK,
)
from saecli.sae.dictionary import SAE
from saecli.sae.formats import FORMATS, SavedSAE, load, recognise, save, save_native, stand_in

D, F, K = 12, 30, 4
ORIGIN = {"model": "some/model", "layer": 3, "site": "resid_post", "context": 128, "prepend_bos": True}
EVERY = [kind(k=K) if "k" in kind.__dataclass_fields__ else kind() for kind in ACTIVATIONS.values()]
WRITTEN = [(name, kind) for name, form in FORMATS.items() for kind in form.activations]


def named(activation: Activation | type[Activation] | str) -> str:
    return activation if isinstance(activation, str) else activation.name


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"W_enc": (D, F), "b_enc": (F,), "W_dec": (F, D), "b_dec": (D,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def sae_with(activation: Activation) -> SAE:
    parameters = {name: torch.rand_like(start) for name, start in activation.parameters(F).items()}
    return SAE(**weights(), activation=activation, activation_parameters=parameters)


def kind_with_k(kind: type[Activation]) -> Activation:
    return kind(k=K) if "k" in kind.__dataclass_fields__ else kind()


ROWS = torch.randn(200, D, generator=torch.Generator().manual_seed(9)) + 2


def relu(pre: np.ndarray) -> np.ndarray:
    return np.maximum(pre, 0)


def largest(rank: np.ndarray, values: np.ndarray) -> np.ndarray:
    kept = np.argsort(-rank, axis=1)[:, :K]
    codes = np.zeros_like(values)
    np.put_along_axis(codes, kept, np.take_along_axis(values, kept, 1), 1)
    return codes


def expected(w: dict[str, Tensor], act: Callable[[np.ndarray], np.ndarray], subtract: bool) -> np.ndarray:
    """`act((x - b_dec) W_enc + b_enc) W_dec + b_dec`, without the subtraction where the library has none."""
    W_enc, b_enc, W_dec, b_dec = (w[name].double().numpy() for name in ("W_enc", "b_enc", "W_dec", "b_dec"))
    x = ROWS.double().numpy()
    return act((x - b_dec * subtract) @ W_enc + b_enc) @ W_dec + b_dec


def saelens_folder(folder: Path, tensors: dict[str, Tensor], architecture: str, **config: object) -> Path:
    document = {"architecture": architecture, "d_in": D, "d_sae": F, "dtype": "float32", "device": "cpu",
                "apply_b_dec_to_input": False, "normalize_activations": "none", "reshape_activations": "none",
                "metadata": {"sae_lens_version": "6.54.12", "model_name": "gpt2", "hook_name": "blocks.8.hook_mlp_out",
                             "context_size": 64, "prepend_bos": False}} | config
    (folder / "cfg.json").write_text(json.dumps(document))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "sae_weights.safetensors")
    return folder


def sparsify_folder(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    document = {"activation": "topk", "num_latents": F, "k": K, "transcode": False, "skip_connection": False,
                "d_in": D} | config
    (folder / "cfg.json").write_text(json.dumps(document))
    named = {"encoder.weight": tensors["W_enc"].T, "encoder.bias": tensors["b_enc"],
             "W_dec": tensors["W_dec"], "b_dec": tensors["b_dec"]}
    save_file({name: t.contiguous() for name, t in named.items()}, folder / "sae.safetensors")
    return folder


def dictionary_folder(folder: Path, state: dict[str, object], name: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"trainer": {"dict_class": name, "lm_name": "gpt2", "layer": 8}}))
    torch.save(state, folder / "ae.pt")
    return folder


def linear_state(w: dict[str, Tensor], bias: str, **extras: Tensor) -> dict[str, object]:
    return {"encoder.weight": w["W_enc"].T, "encoder.bias": w["b_enc"], "decoder.weight": w["W_dec"].T,
            bias: w["b_dec"], **extras}


def assert_reconstructs(folder: Path, reference: np.ndarray) -> SavedSAE:
    saved = load(folder)
    assert np.abs(saved.sae(ROWS).numpy() - reference).max() < 1e-4 * np.abs(reference).max()
    return saved


@pytest.mark.parametrize("activation", EVERY, ids=named)
def test_native_round_trip_is_exact(tmp_path: Path, activation: Activation) -> None:
    sae = sae_with(activation)
    save_native(SavedSAE(sae, ORIGIN), tmp_path)
    found = load(tmp_path)
    assert found.origin == ORIGIN
    assert found.sae.activation == activation
    assert found.sae.tensors().keys() == sae.tensors().keys()
    assert all(torch.equal(found.sae.tensors()[name], tensor) for name, tensor in sae.tensors().items())


@pytest.mark.parametrize(("name", "kind"), WRITTEN, ids=named)
def test_what_is_written_in_a_format_reconstructs_alike_when_read_back(
        tmp_path: Path, name: str, kind: type[Activation]) -> None:
    sae = sae_with(kind_with_k(kind))
    save(SavedSAE(sae, ORIGIN), name, tmp_path / "out")
    assert recognise(tmp_path / "out") == name
    torch.testing.assert_close(load(tmp_path / "out").sae(ROWS), sae(ROWS), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("subtract", [False, True])
def test_saelens_standard_matches_its_formula(tmp_path: Path, subtract: bool) -> None:
    folder = saelens_folder(tmp_path, weights(), "standard", apply_b_dec_to_input=subtract)
    found = assert_reconstructs(folder, expected(weights(), relu, subtract))
    assert found.sae.activation == Relu()
    assert found.origin == {"model": "gpt2", "layer": 8, "site": "mlp_out", "context": 64, "prepend_bos": False}


@pytest.mark.parametrize(("hook", "site"), [
    ("blocks.8.hook_mlp_out", "mlp_out"), ("blocks.8.ln2.hook_normalized", "mlp_in"), ("blocks.8.hook_mlp_in", None),
    ("blocks.8.ln1.hook_normalized", None), ("blocks.8.hook_mlp_in.x", None)])
def test_saelens_hook_names_a_site_and_is_written_as_it_was_read(tmp_path: Path, hook: str, site: str | None) -> None:
    metadata = {"model_name": "gpt2", "hook_name": hook}
    saved = load(saelens_folder(tmp_path, weights(), "standard", metadata=metadata))
    assert saved.origin.get("site") == site
    save(saved, "saelens", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "cfg.json").read_text())["metadata"]["hook_name"]
    assert written == (hook if site else None)


def test_saelens_subtracts_the_decoder_bias_where_its_configuration_is_silent(tmp_path: Path) -> None:
    folder = saelens_folder(tmp_path, weights(), "standard")
    config = json.loads((folder / "cfg.json").read_text())
    del config["apply_b_dec_to_input"]
    (folder / "cfg.json").write_text(json.dumps(config))
    assert_reconstructs(folder, expected(weights(), relu, True))


def test_saelens_jumprelu_matches_its_formula(tmp_path: Path) -> None:
    threshold = torch.linspace(-1, 2, F)  # a threshold below zero acts as zero, there and here
    folder = saelens_folder(tmp_path, weights() | {"threshold": threshold}, "jumprelu", apply_b_dec_to_input=True)
    assert_reconstructs(folder, expected(weights(), lambda pre: relu(pre) * (pre > threshold.numpy()), True))


def test_saelens_topk_clips_at_zero_after_selecting(tmp_path: Path) -> None:
    low = weights() | {"b_enc": weights()["b_enc"] - 9}  # rows with fewer than K positive pre-activations
    folder = saelens_folder(tmp_path, low, "topk", k=K)
    found = assert_reconstructs(folder, expected(low, lambda pre: relu(largest(pre, pre)), False))
    assert ((found.sae.encode(ROWS) != 0).sum(1) < K).any()


@pytest.mark.parametrize("subtract", [False, True])
def test_saelens_topk_that_ranks_by_decoder_norm_matches_its_formula(tmp_path: Path, subtract: bool) -> None:
    w = weights()
    norms = w["W_dec"].double().norm(dim=1).numpy()
    folder = saelens_folder(tmp_path, w, "topk", k=K, rescale_acts_by_decoder_norm=True,
                            apply_b_dec_to_input=subtract)
    assert_reconstructs(folder, expected(w, lambda pre: relu(largest(pre * norms, pre * norms)) / norms, subtract))


def test_saelens_abstopk_keeps_signs(tmp_path: Path) -> None:
    folder = saelens_folder(tmp_path, weights(), "abstopk", k=K)
    assert_reconstructs(folder, expected(weights(), lambda pre: largest(np.abs(pre), pre), False))


@pytest.mark.parametrize(("architecture", "config", "names"), [
    ("gated", {}, "gated"),
    ("transcoder", {"apply_b_dec_to_input": True}, "apply_b_dec_to_input True"),
    ("standard", {"normalize_activations": "layer_norm"}, "normalize_activations 'layer_norm'"),
    ("standard", {"normalize_activations": "expected_average_only_in"}, "expected_average_only_in"),
    ("topk", {"k": 1000}, "1000"),
    ("topk", {}, "k must be a whole number, got None"),
])
def test_saelens_what_cannot_be_expressed_is_refused_by_name(
        tmp_path: Path, architecture: str, config: dict, names: str) -> None:
    with pytest.raises(FormatError, match=names):
        load(saelens_folder(tmp_path, weights(), architecture, **config))


def test_sparsify_subtracts_the_bias_and_clips_before_selecting(tmp_path: Path) -> None:
    low = weights() | {"b_enc": weights()["b_enc"] - 9}
    folder = sparsify_folder(tmp_path, low)
    assert_reconstructs(folder, expected(low, lambda pre: largest(relu(pre), relu(pre)), True))


@pytest.mark.parametrize(("config", "names"), [
    ({"transcode": 1}, "transcode 1"), ({"skip_connection": True}, "skip_connection True"),
    ({"activation": "groupmax"}, "activation 'groupmax'"), ({"signed": True}, "signed True")])
def test_sparsify_what_cannot_be_expressed_is_refused_by_name(tmp_path: Path, config: dict, names: str) -> None:
    with pytest.raises(FormatError, match=names):
        load(sparsify_folder(tmp_path, weights(), **config))


def test_dictionary_learning_classes_match_their_formulas(tmp_path: Path) -> None:
    w, k = weights(), torch.tensor(K, dtype=torch.int)
    per_latent, single = torch.linspace(0, 2, F), torch.tensor(0.7)
    cases = {
        "AutoEncoder": (linear_state(w, "bias"), relu, True),
        "AutoEncoderNew": (linear_state(w, "decoder.bias"), relu, False),
        "AutoEncoderTopK": (linear_state(w, "b_dec", k=k, threshold=torch.tensor(-1.0)),
                            lambda pre: largest(relu(pre), relu(pre)), True),
        "BatchTopKSAE": (linear_state(w, "b_dec", k=k, threshold=single),
                         lambda pre: relu(pre) * (relu(pre) > float(single)), True),
        "JumpReluAutoEncoder": (w | {"threshold": per_latent},
                                lambda pre: relu(pre * (pre > per_latent.numpy())), False),
    }
    for name, (state, act, subtract) in cases.items():
        (tmp_path / name).mkdir()
        found = assert_reconstructs(dictionary_folder(tmp_path / name, state, name), expected(w, act, subtract))
        assert found.origin == {"model": "gpt2", "layer": 8}


@pytest.mark.parametrize(("name", "read_as"), [("saelens", JumpRelu()), ("dictionary-learning", BatchTopK(k=K))])
def test_batchtopk_is_written_as_what_the_library_calls_it(tmp_path: Path, name: str, read_as: Activation) -> None:
    sae = sae_with(BatchTopK(k=K))
    sae.activation_parameters["threshold"].fill_(1.5)
    save(SavedSAE(sae), name, tmp_path / "out")
    found = load(tmp_path / "out").sae
    assert found.activation == read_as
    assert torch.equal(found.activation.thresholds(found.activation_parameters, F), torch.full((F,), 1.5))
    assert 0 < (sae.encode(ROWS) == 0).float().mean() < 1
    torch.testing.assert_close(found.encode(ROWS), sae.encode(ROWS), atol=1e-4, rtol=1e-5)


def test_an_sae_saved_before_an_option_existed_is_read_with_its_default(tmp_path: Path) -> None:
    sae = sae_with(JumpRelu())
    header = {"format_version": 1, "origin": {}, "activation": {"name": "jumprelu", "bandwidth": 0.7}}
    save_file(sae.tensors(), tmp_path / "sae.safetensors", {"saecli": json.dumps(header)})
    assert load(tmp_path).sae.activation == JumpRelu(bandwidth=0.7)
    header["activation"]["unheard_of"] = 1
    save_file(sae.tensors(), tmp_path / "sae.safetensors", {"saecli": json.dumps(header)})
    with pytest.raises(FormatError, match=r"unexpected \['unheard_of'\]"):
        load(tmp_path)


def test_dictionary_learning_other_classes_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="'GatedAutoEncoder' cannot be expressed here"):
        load(dictionary_folder(tmp_path, {}, "GatedAutoEncoder"))


class Bomb:
    """Unpickled without protection, this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.path, "executed")


@pytest.mark.parametrize("dump", [torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing, 2))])
def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path, dump: Callable) -> None:
    folder, trace = dictionary_folder(tmp_path, {}, "AutoEncoder"), tmp_path / "trace"
    dump({"bias": Bomb(trace)}, folder / "ae.pt")
    with pytest.raises(FormatError, match="expected tensors alone, got other Python objects"):
        load(folder)
    assert not trace.exists()


def test_an_object_array_in_params_npz_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "params.npz", W_enc=np.array([{}], dtype=object))
    with pytest.raises(FormatError, match="expected floating-point numbers in 'W_enc', got object"):
        load(tmp_path)


def test_gemma_scope_matches_its_formula(tmp_path: Path) -> None:
    threshold = torch.linspace(0, 2, F)
    arrays = {name: tensor.numpy() for name, tensor in (weights() | {"threshold": threshold}).items()}
    np.savez(tmp_path / "params.npz", **arrays)
    assert_reconstructs(tmp_path, expected(weights(), lambda pre: relu(pre) * (pre > threshold.numpy()), False))


def test_half_precision_weights_are_read_as_float32(tmp_path: Path) -> None:
    folder = saelens_folder(tmp_path, {name: t.bfloat16() for name, t in weights().items()}, "standard")
    assert {t.dtype for t in load(folder).sae.tensors().values()} == {torch.float32}


def test_dictionary_learning_relu_is_written_with_unit_decoder_rows_even_where_one_is_zero(tmp_path: Path) -> None:
    sae = sae_with(Relu())
    sae.W_dec[5] = 0
    save(SavedSAE(sae), "dictionary-learning", tmp_path / "out")
    state = torch.load(tmp_path / "out" / "ae.pt", weights_only=True)
    torch.testing.assert_close(state["decoder.weight"].norm(dim=0), torch.ones(F))
    torch.testing.assert_close(load(tmp_path / "out").sae(ROWS), sae(ROWS), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("name", "kind"), [
    ("saelens", TopK), ("sparsify", TopK), ("sparsify", JumpRelu), ("sparsify", BatchTopK), ("sparsify", AbsTopK),
    ("dictionary-learning", AbsTopK), ("gemma-scope", ReluTopK), ("gemma-scope", TopK),
    *((name, kind) for name in ("saelens", "sparsify", "dictionary-learning", "gemma-scope")
      for kind in (Swish, SoftTopK))], ids=named)
def test_an_activation_that_a_format_lacks_is_refused_by_name(
        tmp_path: Path, name: str, kind: type[Activation]) -> None:
    with pytest.raises(FormatError, match=f"{name} cannot express the activation {kind.name}"):
        save(SavedSAE(sae_with(kind_with_k(kind))), name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_topk_and_its_stand_in_differ_only_on_rows_with_fewer_positive_pre_activations() -> None:
    sae = sae_with(TopK(k=K))
    sae.b_enc.sub_(6)
    short = (sae.pre_activations(ROWS) > 0).sum(1) < K
    differ = (stand_in(SavedSAE(sae)).sae.encode(ROWS) != sae.encode(ROWS)).any(1)
    assert 0 < short.sum() < len(ROWS)
    assert torch.equal(differ, short)


def test_relu_topk_is_relu_before_or_after_selecting() -> None:
    pre = torch.randn(300, F, generator=torch.Generator().manual_seed(1)) - 1
    before = torch.zeros_like(pre).scatter(1, pre.relu().topk(K).indices, pre.relu().topk(K).values)
    assert torch.equal(ReluTopK(k=K)(pre, {}).dense(), before)


AE = {"config.json": b'{"trainer": {"dict_class": "AutoEncoder"}}'}


@pytest.mark.parametrize("files", [
    {"sae.safetensors": b"\x08\0\0\0\0\0\0\0{}      "}, {"sae.safetensors": b"garbage"},
    {"sae.safetensors": b"", "cfg.json": b"{"}, {"cfg.json": b"[]", "sae_weights.safetensors": b""},
    {"config.json": b"{}", "ae.pt": b""}, AE | {"ae.pt": b""}, AE | {"ae.pt": b"\x80\x02."},
    AE | {"ae.pt": b"PK\3\4garbage"}, {"params.npz": b"PK\3\4garbage"}, {"params.npz": b""}])
def test_damaged_files_are_named_in_a_format_error(tmp_path: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=str(tmp_path)):
        load(tmp_path)


@pytest.mark.parametrize("spoil", [
    lambda w: w.pop("b_dec"), lambda w: w.update(extra=torch.ones(1)), lambda w: w.update(b_enc=torch.ones(F + 1)),
    lambda w: w["W_dec"].__setitem__(0, torch.nan), lambda w: w.update(b_dec=torch.ones(D, dtype=torch.int64)),
    lambda w: w.update(W_enc=torch.ones(D))])
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, spoil: Callable) -> None:
    tensors = weights()
    spoil(tensors)
    with pytest.raises(FormatError):
        load(saelens_folder(tmp_path, tensors, "standard"))


def test_a_folder_without_an_sae_is_told_what_would_be_one(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(FormatError, match=r"expected cfg.json and sae_weights.safetensors \(saelens\).*got model.bin"):
        load(tmp_path)
    with pytest.raises(FormatError, match="no such folder"):
        load(tmp_path / "nowhere")


def test_saving_into_a_folder_in_use_is_refused_and_into_an_empty_one_is_not(tmp_path: Path) -> None:
    saved = SavedSAE(sae_with(Relu()))
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FormatError, match="expected an empty or a new folder"):
        save(saved, "saelens", tmp_path)
    (tmp_path / "empty").mkdir()
    save(saved, "saelens", tmp_path / "empty")
    assert recognise(tmp_path / "empty") == "saelens"
