"""The pages of `sae report` in a real browser, opened from disk.

They need a Chromium and playwright, which drives it: apt install chromium; pip install -e '.[browser]'.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opened_pages import interesting, needs_browser
from reports import NASTY, index_of, pages_of

pytestmark = needs_browser
PHONE = {"width": 360, "height": 740}
CONTRAST = """(selector) => [...document.querySelectorAll(selector)].map((element) => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
    const read = (colours) => {
        canvas.clearRect(0, 0, 1, 1);
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        const light = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
            .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2];
    };
    const [dark, bright] = [read(layers), read([...layers, getComputedStyle(element).color])].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
})"""


def test_pages_open_from_disk_without_an_error_and_load_a_latents_data_only_when_it_is_opened(open_page: Any):
    one = open_page()
    uri = one.folder.as_uri()
    assert one.page.inner_text("h1") == "run"
    assert one.page.locator("svg").count() == 3
    assert "14 latents fire on every row." in one.page.inner_text("#overview")
    files = [url for url in one.asked if not url.startswith("data:")]
    assert files == [f"{uri}/index.html"]
    one.page.click("tbody a >> text='17'")
    one.page.wait_for_selector(".example")
    files = [url for url in one.asked if not url.startswith("data:")]
    assert files == [f"{uri}/index.html", f"{uri}/latents/00001.js"]
    assert one.page.inner_text("h1:visible") == "Latent 17"
    assert one.page.locator(".example").count() == 12
    assert one.page.locator(".ranked .up").count() == one.page.locator(".ranked .down").count() == 10
    one.page.click("a[rel=up]")
    assert one.page.locator(".latents").is_visible()
    assert one.said == []


def test_texts_are_shown_as_text_whatever_is_in_them(open_page: Any):
    one = open_page()
    read = ""
    for latent in range(20):
        one.page.goto((one.folder / "index.html").as_uri() + f"#latent/{latent}")
        one.page.wait_for_selector(".example")
        assert one.page.inner_text("h1:visible") == f"Latent {latent}"
        read += one.page.locator("#latent").text_content()
    for word in NASTY:
        shown = word.replace("\u2028", "").replace("\u202e", "")
        assert shown in read
    assert one.page.locator("img").count() == 0
    assert one.said == []


def test_bars_of_activations_are_equally_wide_and_as_high_as_the_counts_that_they_tell(open_page: Any):
    one = open_page(at="#latent/3")
    one.page.wait_for_selector(".example")
    counts = pages_of(one.folder)[3]["counts"]
    bars = one.page.locator("[aria-label='histogram of activations'] .bar")
    drawn = bars.evaluate_all("""(bars) => bars.map((bar) => {
        const [hit, shown] = [...bar.querySelectorAll("rect")].map((rect) => rect.getBBox());
        return [hit.width, shown.height, bar.querySelector("title").textContent];
    })""")
    widths, heights, titles = zip(*drawn, strict=True)
    assert widths == pytest.approx([widths[0]] * len(counts), rel=0.01)
    assert heights == pytest.approx([count * max(heights) / max(counts) for count in counts], abs=1)
    assert [title.split(": ")[1] for title in titles] == [f"{count:,} rows" for count in counts]
    assert one.page.locator(".side .tiles dd").nth(1).inner_text() == f"{sum(counts):,}"  # the tile of its rows
    assert one.said == []


def test_search_finds_tokens_and_numbers(open_page: Any):
    one = open_page("many")
    index = index_of(one.folder)["latents"]
    one.page.fill("#search", "w7")
    texts = ["\n".join([*tokens, "".join(snippet)]) for tokens, snippet in zip(index["tokens"], index["snippets"],
                                                                               strict=True)]
    expected = [latent for latent in interesting(index) if "w7" in texts[latent]]
    assert [int(row[0]) for row in one.rows()] == expected[:50]
    assert one.page.inner_text("#count") == f"1–{min(50, len(expected))} of {len(expected):,}"
    one.page.fill("#search", "4001")
    assert "4001" in [row[0] for row in one.rows()]
    one.page.fill("#search", "no such text")
    assert (one.rows(), one.page.inner_text("#count")) == ([], "no latent matches")
    one.page.fill("#search", "")
    one.page.select_option("#kind", "silent ones")
    silent = int((np.array(index["frequency"]) == 0).sum())
    assert one.page.inner_text("#count").endswith(f"of {silent:,}" if silent else "matches")
    assert one.said == []


@pytest.mark.parametrize(("column", "name"), [(1, "frequency"), (2, "mean"), (3, "largest"),
                                            (4, "interest")])
def test_columns_sort_all_latents_both_ways(open_page: Any, column: int, name: str):
    one = open_page("many")
    values = np.array(index_of(one.folder)["latents"][name])
    head = one.page.locator("th button").nth(column)
    one.page.locator("th button").nth(0).click()
    for direction, word in ((-1, "descending"), (1, "ascending")):
        head.click()
        assert one.page.locator("th").nth(column).get_attribute("aria-sort") == word
        order = np.argsort(direction * values, kind="stable")
        assert [int(row[0]) for row in one.rows()] == order[:50].tolist()
    one.page.click("[aria-label='last page']")
    assert int(one.rows()[-1][0]) == order[-1]
    one.page.click("[aria-label='previous page']")
    assert len(one.rows()) == 50


def test_a_table_of_4096_latents_is_small_and_draws_a_page_of_them(open_page: Any):
    one = open_page("many")
    assert (one.folder / "index.html").stat().st_size < 2e6
    assert one.page.locator(".latents tbody tr").count() == 50
    assert one.page.inner_text("#count") == "1–50 of 4,096"


@pytest.mark.parametrize("at", ["", "#latent/3"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone_and_all_can_be_read_in_light_and_dark(open_page: Any, at: str, scheme: str):
    one = open_page(at=at, viewport=PHONE, color_scheme=scheme)
    one.page.wait_for_selector(".example" if at else "tbody tr")
    assert one.width() == PHONE["width"]
    if not at:
        one.page.click("summary")
        assert one.width() == PHONE["width"]
    background = one.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, background[4:-1].split(","))) < 80) == (scheme == "dark")
    for selector in ("p", "td", "dd", "dt", "a", ".chip", ".muted", ".fires", "mark", "th button", "li"):
        assert min(one.page.evaluate(CONTRAST, selector), default=21) >= 4.5, selector
    assert one.said == []


def test_a_very_long_token_wraps(open_page: Any):
    one = open_page(viewport=PHONE)
    one.page.fill("#search", "longlong")
    one.page.locator("tbody a").first.click()
    one.page.wait_for_selector(".example")
    one.page.check("#unfolded")
    longest = one.page.locator(".words span", has_text="longlonglong").first
    box = longest.bounding_box()
    assert box["height"] > 100
    assert box["x"] + box["width"] <= PHONE["width"]
    assert one.width() == PHONE["width"]


def test_everything_can_be_done_with_the_keyboard(open_page: Any):
    one = open_page()
    one.page.keyboard.press("/")
    assert one.page.evaluate("document.activeElement.id") == "search"
    one.page.keyboard.type("13")
    assert "13" in [row[0] for row in one.rows()]
    one.page.fill("#search", "")
    fourth, fifth = interesting(index_of(one.folder)["latents"])[4:6]
    one.page.locator("tbody a").nth(4).focus()
    one.page.keyboard.press("Enter")
    one.page.wait_for_selector(".example")
    assert one.page.inner_text("h1:visible") == f"Latent {fourth}"
    assert one.page.evaluate("document.activeElement.textContent") == f"Latent {fourth}"
    one.page.keyboard.press("ArrowRight")
    assert one.page.inner_text("h1:visible") == f"Latent {fifth}"
    one.page.keyboard.press("ArrowLeft")
    assert one.page.inner_text("h1:visible") == f"Latent {fourth}"
    one.page.keyboard.press("g")
    one.page.keyboard.type("17")
    one.page.keyboard.press("Enter")
    assert one.page.inner_text("h1:visible") == "Latent 17"
    one.page.keyboard.press("Escape")
    assert one.page.locator(".latents").is_visible()


def test_next_follows_the_order_of_the_table(open_page: Any):
    one = open_page()
    one.page.locator("th button").nth(1).click()
    order = [row[0] for row in one.rows()]
    one.page.locator("tbody a").nth(2).click()
    one.page.click("a[rel=next]")
    assert one.page.inner_text("h1:visible") == f"Latent {order[3]}"


def test_a_latent_or_file_that_is_not_there_is_told(open_page: Any, folders: dict[str, Path], tmp_path: Path):
    one = open_page(at="#latent/999")
    assert "There is no such latent" in one.page.inner_text("#latent")
    alone = tmp_path / "index.html"
    alone.write_bytes((folders["texts"] / "index.html").read_bytes())
    one.page.goto(alone.as_uri() + "#latent/3")
    one.page.wait_for_selector("text=latents/00000.js cannot be loaded; it has to lie beside index.html")
    assert json.dumps(one.page.inner_text("h1:visible")) == '"Latent 3"'
