"""The public functions that measure SAEs. An argument is declared here alone: option, help, default, allowed values.
Imports neither NumPy nor torch until a function runs: help pages are fast."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from ..base.console import listening
from ..base.home import Home
from ..base.options import Count, NonNegative, Seed, Shown, checked
from ..base.words import demand_text, refuse_idle, unknown_choice
from ..store.origin import last_layer, place_given
from .arguments import (
    PATH,
    Against,
    Also,
    Data,
    Device,
    HomeLike,
    Latents,
    Layer,
    Messages,
    Method,
    Model,
    Module,
    Progress,
    SAELike,
    Site,
    SplicedModel,
    SplicedModels,
    Split,
    Steps,
    Target,
    Tokens,
    Why,
    latents_shown,
)

JUDGE = "A language model as judge"


@checked
def sparsity(
    sae: SAELike = None,
    data: Data = None,
    *,
    target: Target = None,
    split: Split = "test",
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """Count how often an SAE's latents fire; CLI equivalent: `sae sparsity`. Arguments as in `evaluate`.

    Returns:
        `run`, `data`, `split`, the measures of `Firing.result`, among them `frequency`, the fraction of the rows on
        which each latent fires, `dead_fraction`, for a crosscoder `hook_points_document`, for a mixture of texts
        `sources`: `Firing.result` on the rows of each, and `mainly`, the latents with `MAINLY` of their firings there
        if sources had equally many rows, of those with `LEAST_ROWS` firings elsewhere at equal rates.
    """
    from ..sae.metrics import firing
    from .evaluate import sparsity_document
    from .measured import ChosenRows

    listener = listening(progress)
    measured = ChosenRows(Home.at(home), data, split, device, listener, target).with_sae(sae)
    return sparsity_document(measured, firing(measured.sae, measured.inputs(listener)), listener)


@checked
def evaluate(
    sae: SAELike | Sequence[SAELike] = None,
    data: Data = None,
    *,
    target: Target = None,
    split: Split = "test",
    model: SplicedModels = None,
    tokenizer: Any = None,
    tokens: Tokens = None,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> Any:
    """Measure SAEs on rows; CLI equivalent: `sae eval`.

        fvu = E||x_hat - x||^2 / (E||x||^2 - ||E x||^2)

    Args:
        sae: what `load_sae` takes, or a list of such; None for the newest run.
        data: a store or its name in the home, read at `split`; or rows chosen from a store, or rows in memory (N, D),
            which are all measured.
        target: for rows in memory an array (N, E).
        model: ID@REVISION is a branch, tag or commit on the hub, by default the commit that the rows came from. Or a
            loaded model, or several, with their `tokenizer`. True: the model that the store names, or a note where it
            is not on this machine or does not fit; None or False: without.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        progress: show progress, and the choices made, on stderr.

    Returns:
        `run`, `data`, `split`, the measures of `Reconstruction.result`, `dead_fraction`; on rows made of known features
        (`sae import synthetic`) the measures of `FeatureScores.result`; with a model those of `splice.effects.effects`,
        for a crosscoder as `hook_points` also of each alone, of several models only so; for a mixture of texts
        `sources`, the same measures on the rows of each. For a list of SAEs, a list.
    """
    from ..model.choice import model_given
    from .evaluate import check_tokens, compare_measured
    from .measured import ChosenRows

    check_tokens(tokens, model)
    given = model_given(model, tokenizer)
    listener = listening(progress)
    chosen_rows = ChosenRows(Home.at(home), data, split, device, listener, target)
    saes: Sequence[Any] = sae if isinstance(sae, list | tuple) else [sae]
    documents = compare_measured(chosen_rows.with_all(saes), given, tokens, listener)
    return documents if saes is sae else documents[0]


@checked
def read(
    sae: SAELike,
    text: str | Messages,
    model: Model = None,
    *,
    tokenizer: Any = None,
    compare: Annotated[
        str | Messages | None,
        Shown("List the latents whose largest codes on this text differ most.", kind=str | None),
    ] = None,
    latents: Annotated[
        int | Sequence[int] | str | None,
        Shown(
            "Show the text coloured by this latent's codes, from 0.", name="latent", kind=int | None
        ),
    ] = None,
    top: Annotated[Count, Shown("Latents to list for the text, and at most for each token.")] = 10,
    why: Why = None,
    against: Against = None,
    steps: Steps = 1,
    also: Also = (),
    layer: Layer = None,
    site: Site = None,
    module: Module = None,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """The latents of an SAE that fire on a text. CLI equivalent: `sae read`.

    Args:
        sae, device, home, progress: as in `evaluate`.
        text, compare: a text, or the messages of a chat, each with role and content.
        model: by default the one that the SAE's file names. Or a loaded model, with its `tokenizer`.
        latents: to describe; `listed`: all that are among the `top` of a token; by default the `top` strongest.

    Returns:
        The hook point. `tokens`, each with its text (a character of several tokens stands at the first), whether it is
        special, its role in a chat, and its `top` strongest latents with codes. `latents`, the strongest first, each
        with its largest `code`, `position` and `token` there, the number of tokens that it `fires_on`, its `codes` at
        these `positions`, `frequency` on `store_rows` rows of the store of its training, None without that, and `label`
        and `verdict` in the run's `labels.json` and `effects.json`, if any. With `compare` its `tokens`, and `latents`
        by `difference`, the largest code `here` less the largest `there`, in the other text. With `why` its `value`,
        log p(why) [- log p(against)] after the token at `position`; how much is `attributed` to latents, error and the
        rest; and its change without each of `latents` and other parts (`removed`), `predicted` and `measured`. All
        latents then have an `attribution`, and `attributions` at their positions. `also`: the same of each further SAE;
        `removed` then has `jointly`, the change without the `latents` of all.
    """
    from ..base.devices import device_named
    from ..model.language_model import LanguageModel
    from ..model.saes import open_sae
    from ..splice.placement import model_of, placement
    from .attribution import Metric, Question, demand_asked
    from .latents import latents_given
    from .read import Known, Reader, placed_beside, reading_document

    texts = {"the text": text} | ({} if compare is None else {"--compare": compare})
    for name, words in texts.items():
        demand_text(name, words)
    if isinstance(latents, str) and latents != "listed":
        raise unknown_choice("latents", latents, ["listed"])
    demand_asked(why, against, compare, also)
    listener, at = listening(progress), Home.at(home)
    opened = open_sae(at, sae, listener)
    sae_at = placement(opened, *place_given(layer, site, module), "reading a prompt by")
    described: list[int] | Literal["listed"] | None = "listed"
    if not isinstance(latents, str):
        described = latents_given(latents, sae_at.sae.d_sae, sae_at.name)
    others = [open_sae(at, each, listener) for each in also]
    beside = placed_beside(sae_at, others)
    knowns = [Known.of(at, each, device) for each in (opened, *others)]
    source = model_of([sae_at, *beside], model, listener, tokenizer=tokenizer)
    asked = why is not None
    last = None if asked else last_layer(sae_at.reads)
    loaded = LanguageModel(source, device_named(device), head=asked, last=last)
    reader = Reader(sae_at, loaded)
    readings = [reader.read(words, name, listener) for name, words in texts.items()]
    answers = []
    if why is not None:
        question = Question(Metric.of(loaded, why, against), steps, top)
        chosen = None if described == "listed" else described
        answers = [reader.answer(readings[0], knowns[0], question, chosen, listener)]
        if others:
            several = [*zip(beside, knowns[1:], strict=True)]
            answers = reader.answers_with(answers[0], several, text, question, listener)
    return reading_document(sae_at, source.name, readings, described, top, knowns[0], answers)


@checked
def steer(
    sae: SAELike,
    latents: Annotated[
        int | Sequence[int],
        Shown(
            "Change this latent, from 0; repeat for several.", name="latent", kind=tuple[int, ...]
        ),
    ],
    prompts: Annotated[
        str | Sequence[str],
        Shown("Continue this text; repeat for several.", name="prompt", kind=tuple[str, ...]),
    ],
    *,
    method: Method = "add",
    scale: Annotated[
        float | Sequence[float] | None,
        Shown(
            "Change in units of the code; give one for all latents, or one for each.",
            kind=tuple[float, ...] | None,
            default_words="each latent's largest code on the run's store",
        ),
    ] = None,
    model: Model = None,
    tokenizer: Any = None,
    layer: Layer = None,
    site: Site = None,
    module: Module = None,
    max_new_tokens: Annotated[Count, Shown("Generate at most this number of tokens.")] = 40,
    temperature: Annotated[
        NonNegative, Shown("Sample at this temperature; 0: the likeliest token.")
    ] = 0.0,
    seed: Annotated[Seed, Shown("With --temperature, seed the sampling of both texts.")] = 0,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """Continue prompts with latents of an SAE changed, and without; CLI equivalent: `sae steer`. `model` may be a
    loaded one, with its `tokenizer`; `saecli.steering` changes one in a notebook.

    Returns:
        The arguments as used; `activation_norm`, the median norm of the activations that are changed, None without any;
        `latents`, each with its `label` in the run's `labels.json`, if any, `decoder_norm`, `prompt_max` and
        `store_max`, its largest codes on the prompts and on `store_rows` rows of the store of its training, None
        without these; and `continuations`, for each `prompt` the texts that follow it, `plain` and `steered`.
    """
    from ..base.devices import device_named
    from ..model.choice import at_commit, model_given
    from ..model.language_model import LanguageModel
    from ..model.saes import open_sae
    from ..splice.placement import model_of
    from .labels import shown_labels
    from .steer import Prompts, Sampling, change_of, largest_on_store, steerable, steering_document

    texts = [prompts] if isinstance(prompts, str) else prompts
    for text in texts:
        demand_text("--prompt", text)
    listener, at = listening(progress), Home.at(home)
    given = at_commit(model_given(model, tokenizer))
    opened = subject, saved = open_sae(at, sae, listener)
    sae_at = steerable(opened, method, given, *place_given(layer, site, module))
    change = change_of(sae_at, method, latents, scale)
    labels = shown_labels(subject.folder, saved.sae.d_sae)
    on_store = largest_on_store(at, opened, device, change.latents)
    change = change.scaled_by(on_store)
    source = model_of([sae_at], given, listener)
    loaded = LanguageModel(source, device_named(device), head=True)
    sampling = Sampling(max_new_tokens, temperature, seed)
    encoded = Prompts.of(loaded, texts, sae_at, not saved.sae.widths, sampling, listener)
    continuations = encoded.continued(change, sampling, listener)
    return steering_document(encoded, change, on_store, sampling, labels, continuations)


@checked
def probe(
    saes: SAELike | Sequence[SAELike] = None,
    *,
    model: Model = None,
    tokenizer: Any = None,
    layer: Layer = None,
    site: Site = None,
    module: Module = None,
    sets: Annotated[
        str | Sequence[str] | None,
        Shown(
            "Probe these sets: names or patterns, such as 87_glue_cola,*emotion*.",
            kind=str | None,
            default_words="all 113",
        ),
    ] = None,
    rows: Annotated[
        int, Ge(20), Shown("Read this number of texts per set, half of each class.")
    ] = 200,
    k: Annotated[
        Sequence[int],
        Shown("Fit a probe on k latents; repeat for several.", kind=tuple[Count, ...]),
    ] = (1, 2, 5, 16),
    context: Annotated[
        Count | None,
        Shown(
            "Read at most this number of last tokens of a text.",
            default_words="1,024, or the model's positions",
        ),
    ] = None,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """Fit and measure sparse probes on SAEs' latents, and dense ones on activations; CLI equivalent: `sae probe`.

    Args:
        model: by default the one whose activations the SAEs were trained on. Or a loaded model, with its `tokenizer`.
        sets: as one text, names and patterns are separated by commas.

    Returns:
        model, context, rows, folds: as used.
        runs: for each SAE `run`, `layer` and `site`.
        probes: for each SAE and `k`, then for each hook point's dense probe, with `run` and `k` None: `accuracy` and
            `auc`, means over sets, and the ends of their 95% intervals, `accuracy_low` to `auc_high`, None for a single
            set; for an SAE likewise `auc_difference`, the AUC less the dense probe's.
        by_set: for each set its name, `set`, `rows`, `accuracy` and `auc`; for an SAE also `latents`, of the largest
            mean difference over all rows.
    """
    from ..base.devices import device_named
    from ..model.language_model import LanguageModel
    from ..model.saes import open_sae
    from ..splice.placement import model_of, placement
    from .probes import PROBE_CONTEXT, LastTokens, Sets, demand_probed, probe_sets, probes_document

    listener = listening(progress)
    several: Sequence[Any] = saes if isinstance(saes, list | tuple) else [saes]
    opened = [open_sae(Home.at(home), sae, listener) for sae in several or [None]]
    place = place_given(layer, site, module)
    probed = [placement(each, *place) for each in opened]
    demand_probed(probed, k)
    source = model_of(probed, model, listener, tokenizer=tokenizer)
    labelled = Sets()
    names = labelled.chosen(sets)
    context = context or min(PROBE_CONTEXT, source.positions or PROBE_CONTEXT)
    source.check_context(context)
    points = list(dict.fromkeys(each.read for each in probed))
    loaded = LanguageModel(source, device_named(device), last=last_layer(points))
    last_tokens = LastTokens(loaded, points, context, probed[0].prepend_bos)
    with listener.progress("probing", len(names) * rows, "texts") as show:
        lines = probe_sets(probed, last_tokens, labelled.each(names, rows, show), k)
    return probes_document(probed, source.name, context, rows, lines)


@checked
def explain(
    sae: SAELike,
    data: Data = None,
    *,
    target: Target = None,
    latents: Annotated[Latents, latents_shown("Label this latent", "all that fire")] = None,
    count: Annotated[
        Count | None,
        Shown(
            "Label this number of latents, drawn at random.",
            name="latents",
            default_words="all that fire",
        ),
    ] = None,
    labels: Annotated[
        str | Path | None,
        Shown(
            "Take the labels of others: a file of Neuronpedia's explanations, or a folder of them.",
            default_words="none",
            **PATH,
        ),
    ] = None,
    out: Annotated[
        str | Path | None,
        Shown(
            "Add the labels to this file.", default_words="labels.json in the run's folder", **PATH
        ),
    ] = None,
    device: Device = "auto",
    endpoint: Annotated[
        str | None,
        Shown(
            "Server of OpenAI's chat completions: it labels latents, and judges labels.",
            "URL",
            JUDGE,
        ),
    ] = None,
    model_name: Annotated[
        str | None, Shown("The server's name for the language model.", panel=JUDGE)
    ] = None,
    concurrency: Annotated[Count, Shown("Requests at once.", panel=JUDGE)] = 8,
    max_tokens: Annotated[
        Count,
        Shown(
            "Tokens of an answer, at most; models that reason first need thousands.", panel=JUDGE
        ),
    ] = 100,
    dry_run: Annotated[
        bool, Shown("Count requests and tokens, and send none.", panel=JUDGE)
    ] = False,
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """Label latents by rules on tokens, or a language model too, and score the labels; CLI equivalent: `sae explain`.

    Args:
        sae, data, target, device, home, progress: as in `evaluate`; data are a store of texts.
        labels: take these, see `others_labels`, and make none.

    Returns:
        The run, the store, and `labels`, the file. `latents`, each with its `frequency` on the rows read, the `label`
        that is shown, if any, and by kind the label and `scores` in the file. `scores`, a line for the rules and one
        for the rules shuffled among latents: for texts and tokens the mean balanced accuracy over `latents`, and its
        95% interval. With an endpoint: `plan`, see `Endpoint.planned`; `judged`, see `judge`; and `judged_scores`, its
        means as in `scores`.
    """
    from ..model.saes import open_sae
    from .explain import file_of_labels, label_latents, take_labels
    from .judge import Server
    from .latents import latents_given
    from .measured import ChosenRows

    server = Server(endpoint, model_name, concurrency, max_tokens, dry_run)
    making = {"data": data, "target": target, "latent": latents, "latents": count}
    making["endpoint"] = endpoint
    if labels is not None:
        idle = [name for name, value in making.items() if value is not None]
        refuse_idle(idle, "with --labels, which makes no labels; leave one of them out")
    listener, at = listening(progress), Home.at(home)
    opened = open_sae(at, sae, listener)
    subject, d_sae = opened[0], opened[1].sae.d_sae
    chosen = latents_given(latents, d_sae, subject.name)
    path = file_of_labels(at, sae, subject, out, d_sae)
    if labels is not None:
        return take_labels(subject, Path(labels), path, d_sae)
    run = ChosenRows(at, data, "all", device, listener, target).with_opened(*opened)
    return label_latents(run, chosen, count, path, server, listener)


@checked
def controls(
    run: str | Path | None = None,
    *,
    model: SplicedModel = None,
    tokens: Tokens = None,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """Train and measure the baselines of a run; CLI equivalent: `sae controls`. No files are written.

    Args:
        run: name of a finished run of `sae train`; None for the newest run.
        model: as in `evaluate`, for the control with random weights, and for CE and KL on the run's own rows; not for
            a crosscoder of several models.

    Returns:
        controls: the run itself first. For each: `control`, its name, or "none"; `rows`, the held-out rows that it is
            measured on; `fvu`, `l0` and `dead_fraction`; with a world of known features `mcc` and, on the run's own
            rows, `f1`; with a model, on these, `ce_recovered` and `kl`. None where not defined.
        notes: sentences on controls that are left out.

    Cost: up to four trainings. Shuffled rows and a random model's are in memory, 4 bytes per number; a control that
    lacks memory is left out.
    """
    from .controls import RANDOM, SHUFFLED, Controls, original_of
    from .evaluate import check_tokens

    listener = listening(progress)
    check_tokens(tokens, model)
    original, plan = original_of(Home.at(home), run, device, listener)
    work = Controls(original, plan, listener, [])
    spec = work.model_spec(model)
    lines = work.on_own_rows(spec, tokens)
    lines += work.on_other_rows(SHUFFLED, work.shuffled_rows)
    if spec is not None:
        lines += work.on_other_rows(RANDOM, partial(work.rows_of_random_weights, spec))
    return {
        "run": original.subject.name,
        "data": original.stores.name,
        "controls": lines,
        "notes": work.notes,
    }
