"""Finding a language model, bundled, in a folder, in a GGUF file or on the hub, without loading its weights.

transformers' own reader makes a GGUF file's packed weights dense.
"""

import fnmatch
import io
from collections.abc import Collection, Iterable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub import errors as hub_errors
from transformers import AutoConfig

from ..base.devices import multiplies_bf16
from ..base.errors import ConfigError, ModelError, SaeError, causes, one_line
from ..base.files import file_sha256
from ..base.machine import why_refused, why_unreachable
from ..sae.hub import Address
from ..sae.hub import hub_errors as hub_errors_told
from ..store.schema import hash_request
from .options import BUNDLED, MODEL_DTYPES, TINY_GEMMA2, at_revision

GGUF = ".gguf"
# Tensors of models with scaled rotary embeddings (Llama 3.1, Phi 3.5) that the reader has no place for.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# More than the metadata and names of tensors; Gemma 3's 262,144 tokens take 10 MB.
HEAD_BYTES = 1 << 26
CONFIG = "config.json"
# Files next to the weights on which rows depend, as patterns.
SMALL_FILES = (
    CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)
# What is downloaded with a model, besides weights.
DOWNLOADED = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.spm", "*.codes", "*.bpe")
# Patterns of weights; transformers reads those of the first that a model has.
WEIGHTS = (
    ("model.safetensors",),
    ("model.safetensors.index.json", "model-*.safetensors"),
    ("pytorch_model.bin",),
    ("pytorch_model.bin.index.json", "pytorch_model-*.bin"),
)
ADAPTER = "adapter_config.json"
OFFLINE_ADVICE = (
    f"or use --model {TINY_GEMMA2}, which is bundled, or the folder of a downloaded model"
)


@dataclass(frozen=True)
class ModelSource:
    """A model that is bundled, in a local folder or GGUF file, or on the Hugging Face hub."""

    name: str  # as the user gave it, without a revision
    location: str  # a folder or file; of a hub model in the client's cache, at first no weights
    revision: str | None  # the hub commit; None for folders and files
    config: Any  # transformers'
    content: str | None = None  # hash of weights, configuration and tokenizer; None if bundled
    note: str | None = None  # what a user may not expect of its file
    weights: tuple[str, ...] = ()  # files of a hub model; without a network those in the cache

    @property
    def id(self) -> str:
        """The name in stores and files of SAEs: of a folder or file its whole path."""
        local = self.name not in BUNDLED and self.revision is None
        return str(Path(self.location).resolve()) if local else self.name

    @property
    def spec(self) -> str:
        """Its id and commit, as `find_model` takes them."""
        return at_revision(self.id, self.revision)

    def fetch_weights(self) -> None:
        """Download the weights of a hub model, unless they are in the cache."""
        if self.revision is None:
            return
        if not self.weights:
            raise ModelError(
                f"{self.name} has no weights here: expected {' or '.join(patterns[0] for patterns in WEIGHTS)}, got "
                "none; connect to the network, or use another model"
            )
        if all((Path(self.location) / file).exists() for file in self.weights):
            return
        with hub_errors_told(Address(self.name, revision=self.revision)):
            snapshot_download(self.name, revision=self.revision, allow_patterns=list(self.weights))

    @property
    def origin(self) -> dict[str, Any]:
        """What a store says of its model besides what its request has."""
        commit = {} if self.revision is None else {"revision": self.revision}
        return {"layers": self.layers, **commit}

    @property
    def layers(self) -> int:
        return self.config.get_text_config().num_hidden_layers

    @property
    def d_model(self) -> int:
        return self.config.get_text_config().hidden_size

    @property
    def positions(self) -> int | None:
        """`max_position_embeddings`, the longest window in tokens; None if there is none."""
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return longest if isinstance(longest, int) and longest > 0 else None

    def default_layer(self) -> int:
        """The middle block: 12 of Gemma-2-2B's 26."""
        return (self.layers - 1) // 2

    def dtype_on(self, device: torch.device, wanted: str = "auto") -> str:
        """The precision of a forward pass; `auto` is the checkpoint's own where the device multiplies in it, else
        float32. The bundled model, whose figures are to be the same on all CPUs, takes float32 on each."""
        if wanted != "auto":
            return wanted
        text_config = self.config.get_text_config()
        recorded = getattr(text_config, "dtype", None) or getattr(self.config, "dtype", None)
        named = str(recorded).removeprefix("torch.")
        if device.type != "cpu":
            return named if named in MODEL_DTYPES else "float32"
        native = named == "bfloat16" and self.name not in BUNDLED and multiplies_bf16(device)
        return "bfloat16" if native else "float32"

    def check_context(self, context: int) -> None:
        if self.positions is not None and context > self.positions:
            raise ConfigError(
                f"{self.name} takes windows of at most {self.positions:,} tokens, got --context "
                f"{context:,}; lower it"
            )

    def identity(self) -> dict[str, Any]:
        """The part of a request's hash for the weights, the same for commits that do not change them."""
        return {"model": self.id, "weights": self.content}


def find_model(name: str, revision: str | None = None) -> ModelSource:
    """The model of a bundled model's name, a folder, a GGUF file, or a hub id, with a branch, tag or commit there,
    which may follow the id after an @; ModelError if it is missing or gated, or the hub cannot be reached."""
    file = named_file(name)
    if file is None and not Path(name).is_dir():
        name, _, own = name.partition("@")
        revision = revision or own or None
    if name not in BUNDLED and file is None and not Path(name).is_dir():
        return _on_hub(name, revision)
    if revision is not None:
        raise ConfigError(
            f"a revision does nothing with {name}, which is not on the hub; leave it out"
        )
    if file is not None:
        config = _config(name, str(file))
        return ModelSource(name, str(file), None, config, file_sha256(file), note_on(file))
    location = BUNDLED.get(name, Path(name))
    files = [path.name for path in location.iterdir() if path.is_file()]
    demand_model(name, files)
    config = _config(name, str(location))
    if name in BUNDLED:
        return ModelSource(name, str(location), None, config)
    content = _content_of_folder(location, files)
    return ModelSource(name, str(location), None, config, content)


def _on_hub(name: str, revision: str | None) -> ModelSource:
    """A hub model; without a network from the client's cache, with the same commit and content."""
    offline = why_unreachable()
    api = HfApi()
    try:
        commit = api.resolve_revision(
            name, revision=revision, local_files_only=offline is not None
        ).resolved
        if offline is None:
            info = api.model_info(name, revision=commit, files_metadata=True, timeout=30)
            ids = {
                file.rfilename: str(file.lfs.sha256 if file.lfs else file.blob_id)
                for file in info.siblings or ()
            }
            demand_model(name, ids)
            config_path = Path(hf_hub_download(name, CONFIG, revision=commit))
            blobs = config_path.resolve().parent
            # With weights that an earlier commit has brought, since the cache may be all that there is next time.
            brought = [file for file in deciding_files(ids) if (blobs / ids[file]).exists()]
            for file in sorted({*_matching(ids, DOWNLOADED), *brought}):
                hf_hub_download(name, file, revision=commit)
        else:
            config_path = Path(
                hf_hub_download(name, CONFIG, revision=commit, local_files_only=True)
            )
            ids = {path.name: _blob_of(path) for path in config_path.parent.iterdir()}
            demand_model(name, ids)
    except (hub_errors.RevisionResolutionError, hub_errors.LocalEntryNotFoundError) as error:
        raise ModelError(
            f"{at_revision(name, revision)} is not on this machine and the Hugging Face hub cannot be "
            f"reached ({offline or one_line(error)}): connect to the network (a gated model also wants its "
            f"licence accepted at https://huggingface.co/{name}, and `hf auth login`), {OFFLINE_ADVICE}"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise ModelError(
            f"{name} has no branch, tag or commit {revision} on the hub; correct --model-revision"
        ) from error
    except SaeError:
        raise
    # The libraries raise anything for damaged or foreign files.
    except Exception as error:
        raise explained(name, error) from error
    location = str(config_path.parent)
    deciding = deciding_files(ids)
    content = hash_request({file: ids[file] for file in deciding})
    weights = tuple(file for file in deciding if not _matching([file], SMALL_FILES))
    return ModelSource(name, location, commit, _config(name, location), content, weights=weights)


def _blob_of(path: Path) -> str:
    """The hash of a file by the hub: a snapshot links to blobs of that name, where the file system has links."""
    return path.resolve().name if path.is_symlink() or path.is_dir() else file_sha256(path)


def _config(name: str, location: str) -> Any:
    try:
        config = from_pretrained(AutoConfig, location)
    except Exception as error:
        raise explained(name, error) from error
    if not getattr(config.get_text_config(), "num_hidden_layers", None):
        raise ModelError(
            f"{name} has no num_hidden_layers in its configuration, and so no layers to read from; use "
            f"another model"
        )
    return config


def _matching(names: Collection[str], patterns: Iterable[str]) -> list[str]:
    matching = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
    return sorted(matching)


def deciding_files(names: Iterable[str]) -> list[str]:
    """The files of a model on which its rows depend: weights, configuration, tokenizer."""
    outermost = [name for name in names if "/" not in name]
    weights = next((patterns for patterns in WEIGHTS if patterns[0] in outermost), ())
    return _matching(outermost, {*SMALL_FILES, *weights})


def demand_model(name: str, files: Collection[str]) -> None:
    """Refuse files that are not a whole model: where peft is installed transformers adds an adapter's weights to those
    of the model that it names, else it takes the folder's alone."""
    if ADAPTER in files:
        raise ModelError(
            f"{name} holds an adapter ({ADAPTER}): expected a whole model; save the two merged (peft's "
            f"`merge_and_unload`) in a folder of their own, or name the base model"
        )


def _content_of_folder(folder: Path, files: Collection[str]) -> str:
    """Hash of small files, and of sizes and times of weights, which are too long to be read for that."""
    stamps: dict[str, Any] = {}
    for name in deciding_files(files):
        path = folder / name
        if _matching([name], SMALL_FILES):
            stamps[name] = file_sha256(path)
        else:
            stamps[name] = [path.stat().st_size, path.stat().st_mtime_ns]
    return hash_request(stamps)


def explained(name: str, error: BaseException, part: str = "model") -> ModelError:
    """Why a model, or a part of it such as its tokenizer, could not be loaded, and what to do."""
    if "trust_remote_code" in str(error):
        return ModelError(
            f"{name} comes with Python code of its own, and this tool runs no code from a model's "
            f"folder; use a model whose architecture transformers has"
        )
    # The library's message says how to run the file's code all the same.
    if isinstance(error, UnpicklingError):
        return ModelError(
            f"cannot load the model {name}: its weights are a pickle that is damaged or holds code; use "
            f"a model with model.safetensors"
        )
    for cause in causes(error):
        if reason := why_refused(name, cause):
            return ModelError(f"{reason}, {OFFLINE_ADVICE}")
    return ModelError(
        f"cannot load the {part} {name}: {type(error).__name__}: {one_line(error)}; give the hub id, "
        f"folder or GGUF file of a causal language model"
    )


def named_file(name: str) -> Path | None:
    """The file, if a model's name is that of a GGUF file."""
    path = Path(name)
    if path.suffix.lower() != GGUF or path.is_dir():
        return None
    if not path.is_file():
        raise ModelError(f"there is no file {name}; give the path of a GGUF file, or a hub id")
    return path


def note_on(path: Path) -> str | None:
    """What the reader leaves out of a model."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if scaled := [name for name in ROPE_FACTORS if name.encode() in head]:
        return (
            f"{path.name}: transformers leaves out {' and '.join(scaled)}, the factors of its rotary "
            f"embedding, so rows differ from the model's; its folder from the hub has them"
        )
    return None


def from_pretrained(kind: Any, location: str, **settings: Any) -> Any:
    """`kind.from_pretrained` of a folder, or of a GGUF file in a folder of its own: from the files next to it
    transformers would take another model's tokenizer."""
    # If trust_remote_code is not given, the library asks on stdout whether to run a model's Python code.
    settings |= {"local_files_only": True, "trust_remote_code": False}
    path = named_file(location)
    if path is None:
        return kind.from_pretrained(location, **settings)
    if issubclass(kind, transformers.PreTrainedModel):
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # The reader draws progress bars that no setting of transformers hides.
    with TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        Path(folder, path.name).symlink_to(path.resolve())
        return kind.from_pretrained(folder, gguf_file=path.name, **settings)
