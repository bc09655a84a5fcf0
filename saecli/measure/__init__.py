"""FVU, L0, KL in the model, features found, stability, probes, controls: functions that return documents.

functions.py     the public functions: their arguments, which are the commands' options, and what they return
claims.py        the public functions that test claims on latents
arguments.py     arguments that several of them have
measured.py      an SAE with the rows that it is measured on
evaluate.py      FVU, L0, firing frequencies, known features found; several SAEs spliced into a model, alone or at once
cosines.py       decoder vectors aligned with known features, matched one to one, nearest to each other; correlations
stability.py     latents matched between seeds: PW-MCC
contrast.py      latents that tell two sides of documents apart
sides.py         the documents of two sides, and what latents do in each
two_samples.py   AUC, permutation tests, bootstrap intervals
hook_points.py   a crosscoder's latents by hook point
probes.py        sparse probes on labelled texts
controls.py      baselines: the training with one ingredient removed
explain.py       labels of latents, with scores
excerpts.py      texts on which latents fire, and others
rules.py         labels by rules on tokens
judge.py         labels and scores by a language model behind a server
labels.py        the file of labels; balanced accuracy
read.py          the latents that fire on a text
steer.py         text generated with latents changed
verdicts.py      `effects.json`: outcomes of `sae effects`, and verdicts
effects.py       what latents do to predictions beside changes of the same norm: intervals, p, verdicts
trials.py        the changes: where, by which vectors, and their outcomes
latents.py       examples, histograms and partners of latents, in one pass
report.py        what a report shows of latents
"""
