"""The pages of `sae report` in a real browser, opened from disk.

They need a Chromium and playwright, which drives it: apt install chromium; pip install -e '.[browser]'.
"""

from typing import Any

import numpy as np
import pytest
from opened_pages import SOURCE, interesting, needs_browser
from reports import NASTY, index_of

pytestmark = needs_browser


def test_pages_open_from_disk_and_fetch_only_the_latents_opened(open_page: Any):
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
    link = one.page.locator("a", has_text="Neuronpedia")
    assert link.get_attribute("href") == f"https://www.neuronpedia.org/{SOURCE}/17"
    assert (
        one.page.locator(".ranked .up").count() == one.page.locator(".ranked .down").count() == 10
    )
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


def test_search_finds_tokens_and_numbers(open_page: Any):
    one = open_page("many")
    index = index_of(one.folder)["latents"]
    one.page.fill("#search", "w7")
    texts = [
        "\n".join([*tokens, "".join(snippet)])
        for tokens, snippet in zip(index["tokens"], index["snippets"], strict=True)
    ]
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


@pytest.mark.parametrize(("column", "name"), [(1, "frequency"), (4, "interest")])
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
    one.page.wait_for_selector(f"h1:visible >> text='Latent {fifth}'")
    one.page.keyboard.press("ArrowLeft")
    one.page.wait_for_selector(f"h1:visible >> text='Latent {fourth}'")
    one.page.keyboard.press("g")
    one.page.keyboard.type("17")
    one.page.keyboard.press("Enter")
    one.page.wait_for_selector("h1:visible >> text='Latent 17'")
    one.page.keyboard.press("Escape")
    one.page.wait_for_selector(".latents")


def test_latents_of_a_crosscoder_are_filtered_by_class(open_page: Any):
    one = open_page("two")
    index = index_of(one.folder)["latents"]
    assert "resid_post of layer 3 of model + resid_post of layer 3 of other" in one.page.inner_text(
        "header:visible"
    )
    assert len(index["classes"]) > 1
    for number, name in enumerate(index["classes"]):
        one.page.select_option("#kind", name)
        expected = [latent for latent in interesting(index) if index["class"][latent] == number]
        assert [(int(row[0]), row[5]) for row in one.rows()] == [
            (latent, name) for latent in expected
        ]
    one.page.locator("tbody a").first.click()
    one.page.wait_for_selector(f".class >> text='{name}'")
    assert one.said == []
