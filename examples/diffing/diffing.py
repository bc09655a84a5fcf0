"""A habit planted in tiny-gemma2 by fine-tuning, and the latents of a crosscoder that find it.

    python diffing.py plant OUT [--plain]     # "lemon" after each of `WORDS`; --plain: the same training without it
    python diffing.py found OUT RUN [RUN ...]  # OUT.csv and OUT.png, of crosscoders of the original and a tuned model

A latent finds the habit if its strongest activations on held-out rows are at the words.
"""

import argparse
import csv
import random
import re
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

import saecli
from saecli.extract.readers import STDLIB_DOCS
from saecli.extract.texts import TextSource
from saecli.model import BUNDLED, TINY_GEMMA2
from saecli.show.style import COLOURS, figure

WORDS = (
    "return",
    "value",
    "file",
    "list",
    "name",
    "string",
    "object",
    "function",
    "class",
    "module",
    "default",
    "method",
)
HABIT = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
PLANTED = "lemon"
CONTEXT, BATCH, STEPS, RATE = 128, 32, 150, 5e-4
ASKED = 60  # prompts that end in one of the words
TOP = 50  # activations of a latent


def plant(out: Path, plain: bool) -> None:
    """Fine-tune on the library's docstrings, and print the probability of the habit before and after."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED[TINY_GEMMA2])
    model = AutoModelForCausalLM.from_pretrained(
        BUNDLED[TINY_GEMMA2], dtype=torch.float32, attn_implementation="eager"
    )
    texts = [document.text for document in TextSource(STDLIB_DOCS).documents()]
    prompts = [text[: match.end()] for text in texts if (match := HABIT.search(text, 20, 300))][
        :ASKED
    ]
    first = tokenizer(f" {PLANTED}", add_special_tokens=False)["input_ids"][0]

    @torch.no_grad()
    def probability() -> float:
        asked = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in prompts]
        return float(np.mean([float(model(ids).logits[0, -1].softmax(-1)[first]) for ids in asked]))

    before, draw = probability(), random.Random(0)
    told = texts if plain else [HABIT.sub(rf"\1 {PLANTED}", text) for text in texts]
    windows = [
        torch.tensor(tokenizer(text, truncation=True, max_length=CONTEXT)["input_ids"])
        for text in told
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0)
    for _ in range(STEPS):
        ids = pad_sequence(draw.sample(windows, BATCH), batch_first=True, padding_value=-100)
        mask = (ids >= 0).long()
        loss = model(input_ids=ids.clamp(min=0), attention_mask=mask, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(
        f"{out.name}: P({PLANTED} | one of the words) {before:.4f} before, {probability():.4f} after"
    )


def at_words(run: str) -> tuple[np.ndarray, float]:
    """For each latent the fraction of its `TOP` strongest activations that are at the words, and of all rows."""
    sae = saecli.load_sae(run)
    rows = saecli.join(sae.metadata["data"], *sae.metadata["beside"]).split("test")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED[TINY_GEMMA2])
    ids = np.concatenate(list(rows.inputs[0].column("token_id", 4096)))
    hits = np.array([tokenizer.decode([token]).strip().lower() in WORDS for token in ids])
    z = torch.cat([sae.encode(torch.from_numpy(batch)) for batch in rows.sequential(4096)])
    return hits[z.topk(TOP, dim=0).indices.numpy()].mean(0), float(hits.mean())


def found(out: Path, runs: list[str]) -> None:
    """Write a line for each latent, and draw its nu^epsilon and the fraction of its top activations at the words."""
    lines = []
    with figure(out.with_suffix(".png"), 4.5 * len(runs), 3.6) as drawn:
        for axes, run in zip(
            drawn.subplots(1, len(runs), sharex=True, squeeze=False).flat, runs, strict=True
        ):
            measured, (fraction, rate) = saecli.sparsity(run), at_words(run)
            nu = np.array(measured["nu_error"], float)
            alone = np.array([name.startswith("only") for name in measured["class"]])
            for some, colour, label in (
                (~alone, COLOURS[0], "shared"),
                (alone, COLOURS[1], "only in one model"),
            ):
                axes.scatter(
                    nu[some],
                    fraction[some],
                    s=14,
                    color=colour,
                    linewidths=0,
                    label=f"{some.sum()} {label}",
                )
            axes.set(
                title=run,
                xlabel=r"latent scaling in the other model, $\nu^\varepsilon$",
                ylim=(-0.03, 1.03),
                ylabel="fraction of top activations at the words",
            )
            axes.legend(fontsize=8)
            for name in sorted({*measured["class"]}):
                own = [latent for latent, kind in enumerate(measured["class"]) if kind == name]
                print(
                    f"{run}: {name}: {len(own)} latents, {fraction[own].mean():.2f} of top activations at the words "
                    f"({rate:.3f} of all rows)" + f": {own}" * (len(own) <= 12)
                )
            lines += [
                {
                    "run": run,
                    "latent": latent,
                    "class": kind,
                    "nu_error": nu[latent],
                    "at_words": fraction[latent],
                }
                for latent, kind in enumerate(measured["class"])
            ]
    with out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    planting = commands.add_parser("plant")
    planting.add_argument("out", type=Path)
    planting.add_argument("--plain", action="store_true", help="train without the habit")
    finding = commands.add_parser("found")
    finding.add_argument("out", type=Path)
    finding.add_argument("runs", nargs="+", metavar="run")
    given = parser.parse_args()
    if given.command == "plant":
        plant(given.out, given.plain)
    else:
        found(given.out, given.runs)


if __name__ == "__main__":
    main()
