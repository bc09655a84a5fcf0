"""How long a reader of `sae serve` waits: for a text's shades, a latent's page, the first steered token.

    sae serve first --port 8000 &
    python tests/benchmarks/serve.py first http://127.0.0.1:8000

Medians over texts that differ, one after another, as in a browser; the first request of each kind is left out.
"""

import argparse
import json
import time
from statistics import median
from typing import Any

import requests

WORDS = "The river ran past the old mill, where children used to fish on Sundays in the spring. ".split()


def post(url: str, path: str, asked: dict[str, Any], **more: Any) -> requests.Response:
    response = requests.post(f"{url}/api/{path}", json=asked, timeout=120, **more)
    response.raise_for_status()
    return response


def text_of(number: int, tokens: int) -> str:
    words = WORDS * (1 + tokens // len(WORDS))
    return " ".join([str(number), *words[: int(tokens * 0.85)]])


def seconds_to_read(url: str, run: str, text: str) -> tuple[float, int]:
    begun = time.perf_counter()
    document = post(url, "read", {"run": run, "text": text}).json()
    return time.perf_counter() - begun, len(document["tokens"])


def seconds_to_steered(url: str, run: str, text: str) -> float:
    asked = {"run": run, "text": text, "edits": [{"latent": 1, "method": "add", "scale": 5.0}]}
    begun = time.perf_counter()
    with post(url, "steer", asked, stream=True) as growing:
        for line in growing.iter_lines():
            if line and json.loads(line.removeprefix(b"data: ")).get("steered"):
                return time.perf_counter() - begun
    raise RuntimeError("no steered token came")


def seconds_of_latent(url: str, run: str, latent: int) -> float:
    begun = time.perf_counter()
    answer = requests.get(f"{url}/api/latent", {"run": run, "latent": latent}, timeout=120)
    answer.raise_for_status()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("url")
    parser.add_argument("--times", type=int, default=20)
    given = parser.parse_args()
    url, run, numbers = given.url.rstrip("/"), given.run, range(given.times + 1)
    reads = [seconds_to_read(url, run, text_of(number, 64)) for number in numbers]
    steers = [seconds_to_steered(url, run, text_of(number, 16)) for number in numbers]
    begun = time.perf_counter()
    requests.get(f"{url}/api/overview", {"run": run}, timeout=600).raise_for_status()
    overview = time.perf_counter() - begun
    latents = [seconds_of_latent(url, run, number) for number in numbers]
    print(f"a text of {reads[-1][1]} tokens shaded: {median(one for one, _ in reads[1:]):.3f} s")
    print(f"the first steered token: {median(steers[1:]):.3f} s")
    print(f"all latents' table, the first time: {overview:.1f} s")
    print(f"a latent's page: {median(latents[1:]):.3f} s")


if __name__ == "__main__":
    main()
