"""SAEs of one language model, ready to answer: what fires on a text, what a latent is, what it does."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

from torch import Tensor

from ...base.console import Listener, Silent
from ...base.devices import device_named
from ...base.errors import ConfigError, StoreError
from ...base.home import Home
from ...extract.texts import Chats
from ...measure.attribution import Metric, Question, demand_asked
from ...measure.continuing import Continuation, likeliest
from ...measure.kept_codes import KeptCodes
from ...measure.labels import LABELS, Label, add_labels, remove_labels, shown_labels, shown_scores
from ...measure.latents import chosen_latents
from ...measure.measured import ChosenRows, Measured, RowsLike
from ...measure.read import Known, Reader, reading_document
from ...measure.report import ReportContext
from ...measure.steer import CodeEdits, prompt_ids, steerable
from ...model.language_model import LanguageModel
from ...model.saes import open_sae
from ...model.tokenizer import TokenTexts, affixes, characters, special_ids
from ...sae.formats import SavedSAE
from ...sae.library import SAELike, Subject
from ...splice.placement import Placement, model_of, placement
from ...store.origin import without_folders
from ...train.listing import list_home
from ...train.runs import read_metrics
from ..report import LatentPages, overview
from .requests import Edit, Message, ToContinue, ToLabel, ToRead

EXAMPLES, PEAKS = 12, 4  # texts of a latent; tokens of it in the table
KEPT_PAGES = 512  # of latents, in memory
LIKELIEST = 8  # next tokens shown of either row
CURVE = ("step", "batch_fvu", "test_fvu", "loss", "batch_l0", "test_l0")


class Notes(Silent):
    """Collects warnings, to be shown with the answer."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def warn(self, text: str) -> None:
        self.said.append(text)


class ServedSAE:
    """An SAE in its language model, with the rows that its latents are shown on, if these are here."""

    def __init__(
        self,
        home: Home,
        opened: tuple[Subject, SavedSAE],
        sae_at: Placement,
        model: LanguageModel,
        data: RowsLike,
        device: str,
    ) -> None:
        self.name, self._model = sae_at.name, model
        self._home, self._opened, self._at = home, opened, sae_at
        self._data, self._device = data, device
        self._reader = Reader(sae_at, model)
        self._texts = TokenTexts(model.tokenizer)
        self._surveying = Lock()
        self.latent = lru_cache(maxsize=KEPT_PAGES)(self._latent)

    @property
    def d_sae(self) -> int:
        return self._at.sae.d_sae

    @property
    def about(self) -> dict[str, Any]:
        points = [point.to_json() for point in self._at.reads]
        return {"run": self.name, "d_sae": self.d_sae, "inputs": points}

    @property
    def _labels(self) -> dict[int, str]:
        return shown_labels(self._opened[0].folder, self.d_sae)

    @cached_property
    def _known(self) -> Known:
        return Known.of(self._home, self._opened, self._device)

    def read(self, asked: ToRead) -> dict[str, Any]:
        """The document of `saecli.read`, with `notes`; each token's strongest latents are described."""
        demand_asked(asked.why, asked.against, asked.compare)
        notes = Notes()
        texts = {"the text": _messages(asked.text)}
        if asked.compare is not None:
            texts["the text to compare"] = asked.compare
        readings = [self._reader.read(text, name, notes) for name, text in texts.items()]
        known = replace(self._known, labels=self._labels)
        answers = []
        if asked.why is not None:
            metric = Metric.of(self._model, asked.why, asked.against)
            question = Question(metric, asked.steps, asked.top)
            answers.append(self._reader.answer(readings[0], known, question, None, notes))
        document = reading_document(
            self._at,
            without_folders(self._model.source.name),
            readings,
            "listed",
            asked.top,
            known,
            answers,
        )
        return document | {"notes": notes.said}

    @cached_property
    def _rows(self) -> Measured:
        chosen = ChosenRows(self._home, self._data, "all", self._device, Silent(warns=False))
        try:
            return chosen.with_opened(*self._opened)
        except (ConfigError, StoreError) as error:
            raise ConfigError(
                f"the latents of {self.name} are shown on rows of a store, which is not here: {error}"
            ) from error

    @cached_property
    def _context(self) -> ReportContext:
        return ReportContext.of(self._rows, self._model, Silent(warns=False))

    @cached_property
    def _kept(self) -> KeptCodes:
        return KeptCodes(self._rows, Silent(warns=False))

    @cached_property
    def _overview(self) -> dict[str, Any]:
        tokens = [
            [self._context.texts[token] for token in dict.fromkeys(peaks)]
            for peaks in self._kept.peak_tokens(PEAKS)
        ]
        columns: dict[str, Any] = {"chosen": [*range(self.d_sae)]}
        if any(tokens):
            columns["tokens"] = tokens
        return overview(self._context, self._kept.totals, columns)

    def overview(self) -> dict[str, Any]:
        """A report's overview of all latents. The first call encodes the rows, which takes up to a minute or two."""
        with self._surveying:
            document = self._overview
        labels, scores = self._labels, shown_scores(self._opened[0].folder, self.d_sae)
        latents = document["latents"] | {
            "label": [labels.get(latent) for latent in range(self.d_sae)],
            "score": [scores.get(latent) for latent in range(self.d_sae)],
        }
        return document | {"latents": latents}

    def _latent(self, latent: int) -> dict[str, Any]:
        """A report's page of a latent."""
        chosen = chosen_latents([latent], self.d_sae, self.name)
        with self._surveying:
            survey = self._kept.survey(chosen, EXAMPLES)
            found = self._context.report(survey, chosen, Silent(warns=False))
            (page,) = LatentPages(found).files(lambda done: None)
        return page

    def continuation(self, asked: ToContinue) -> "SteeredTexts":
        notes = Notes()
        edit = self._edit(asked.edits)
        # A crosscoder refuses the others.
        others = [each.method for each in asked.edits if each.method != "add"]
        method = others[0] if others else "add"
        steered = steerable(self._opened, method, self._model.source.spec, None, None)
        prefix = affixes(self._model.tokenizer, steered.prepend_bos).prefix
        words = _messages(asked.text)
        if not isinstance(words, str):
            chats = Chats(self._model.tokenizer, None, self._model.source.name)
            words = chats.apply(words, "the chat", tokenize=False, add_generation_prompt=True)
        token_ids = prompt_ids(self._model, prefix, words, asked.most, notes)
        special = sorted(special_ids(self._model.tokenizer, control=False))
        rows = Continuation(
            self._model, token_ids, steered, edit, special, asked.temperature, asked.seed
        )
        return SteeredTexts(rows, self._texts, asked.most, notes.said)

    def _edit(self, edits: Sequence[Edit]) -> CodeEdits | None:
        if not edits:
            return None
        latents = chosen_latents([each.latent for each in edits], self.d_sae, self.name)
        scales = [0.0 if each.method == "ablate" else each.scale for each in edits]
        return CodeEdits(latents, [each.method == "add" for each in edits], scales)

    def label(self, asked: ToLabel) -> dict[str, Any]:
        """Keep a label by hand, or remove it; the label that is shown then, and the one by hand before."""
        folder = self._opened[0].folder
        if folder is None or folder.resolve().parent != self._home.runs.path.resolve():
            raise ConfigError(
                f"labels are kept with runs of the home, and {self.name} is none; train one, or use `sae explain`"
            )
        (latent,) = chosen_latents([asked.latent], self.d_sae, self.name)
        path, words = folder / LABELS, (asked.label or "").strip()
        before = remove_labels(path, "given", [latent], self.d_sae).get(latent)
        if words:
            add_labels(path, "given", {latent: Label(words)}, self.d_sae)
        return {
            "latent": latent,
            "label": self._labels.get(latent),
            "score": shown_scores(folder, self.d_sae).get(latent),
            "before": None if before is None else before.label,
        }


class SteeredTexts:
    """Two texts that grow a token at a time."""

    def __init__(self, rows: Continuation, texts: TokenTexts, most: int, notes: list[str]) -> None:
        self._rows, self._texts, self._left, self._notes = rows, texts, most, notes
        self._ids: list[list[int]] = [[], []]

    def events(self) -> Iterator[dict[str, Any]]:
        """First `next`, the likeliest tokens and their probabilities; then the pieces of each text, and at the end
        `done`. A forward pass lies between two events."""
        while self._left and not all(self._rows.ended):
            tokens, log_p = self._rows.step()
            if not any(self._ids):
                yield {"next": self._next(log_p), "notes": self._notes}
            for row, token in enumerate(tokens):
                if token is not None:
                    self._ids[row].append(token)
            self._left -= 1
            yield self._pieces()
        yield self._pieces() | {"done": True}

    def _next(self, log_p: Tensor) -> dict[str, Any]:
        found = likeliest(log_p, LIKELIEST)
        return {**found, "tokens": [self._texts[token] for token in found["tokens"]]}

    def _pieces(self) -> dict[str, Any]:
        """Each text's pieces, with the id of a piece that is one token."""
        shown = {}
        for name, ids in zip(("plain", "steered"), self._ids, strict=True):
            pieces, at = [], 0
            for text, count in characters(self._texts, ids):
                pieces.append([text, ids[at] if count == 1 else None])
                at += count
            shown[name] = pieces
        return shown


class Workbench:
    """SAEs that act in one language model, which is loaded once.

    Args:
        saes: runs, folders or hub names; None for the newest run.
        model: from `model_given`; None for the one that the SAEs' files name.
        data: the rows that latents are shown on; None for those of training.
    """

    def __init__(
        self,
        home: Home,
        saes: Sequence[SAELike],
        model: Any,
        data: RowsLike,
        device: str,
        listener: Listener,
    ) -> None:
        self._home = home
        opened = [open_sae(home, sae, listener) for sae in saes]
        placements = [placement(each, None, None, "reading a prompt by") for each in opened]
        source = model_of(placements, model, listener)
        with listener.progress(f"loading {source.name}", None, "") as _:
            self._model = LanguageModel(source, device_named(device), head=True)
        self.saes = {
            sae_at.name: ServedSAE(home, each, sae_at, self._model, data, device)
            for each, sae_at in zip(opened, placements, strict=True)
        }

    @property
    def about(self) -> dict[str, Any]:
        return {
            "model": without_folders(self._model.source.name),
            "saes": [sae.about for sae in self.saes.values()],
            "chat": bool(getattr(self._model.tokenizer, "chat_template", None)),
        }

    def sae(self, name: str) -> ServedSAE:
        if name not in self.saes:
            raise ConfigError(
                f"there is no SAE of this name here: expected {' or '.join(self.saes)}"
            )
        return self.saes[name]

    def runs(self) -> dict[str, Any]:
        """The home's runs, newest first, without paths."""
        runs = list_home(self._home.path)["runs"]
        kept = [{key: run[key] for key in run if key not in ("path", "problem")} for run in runs]
        return {"runs": kept}

    def curves(self, name: str) -> dict[str, Any]:
        """What a run logged of its training so far, by name."""
        if name not in self._home.runs.names():
            raise ConfigError("there is no run of this name in the home; `sae list` shows them")
        lines = read_metrics(self._home.runs.path / name)
        return {"run": name, "lines": [{key: line.get(key) for key in CURVE} for line in lines]}


def _messages(text: str | list[Message]) -> Any:
    return text if isinstance(text, str) else [asdict(message) for message in text]
