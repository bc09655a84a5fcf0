"""`sae train` with options that only files of `--config` take, given as words like the others: the paper's."""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from saecli.base.options import toml_lines

OF_FILES = ("clip_norm", "weight_decay", "mu_enc", "nu_enc", "mu_dec", "nu_dec", "beta")


def main(words: list[str]) -> int:
    preset: dict[str, object] = {}
    rest: list[str] = []
    given = iter(words)
    for word in given:
        name = word.removeprefix("--").replace("-", "_")
        if word == "--config":
            preset = tomllib.loads(Path(next(given)).read_text(encoding="utf-8")) | preset
        elif name in OF_FILES:
            preset[name] = float(next(given))
        else:
            rest.append(word)
    if not preset:
        return subprocess.run(["sae", "train", *rest], check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        config.write_text("\n".join(toml_lines(preset)), encoding="utf-8")
        command = ["sae", "train", "--config", str(config), *rest]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
