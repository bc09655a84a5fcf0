"""The pages of `sae report` in a real browser, opened from disk.

They need a Chromium and playwright, which drives it: apt install chromium; pip install -e '.[browser]'.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from homes import steerable
from opened_pages import SOURCE, TRIED, VERDICT, interesting, needs_browser
from reports import NASTY, index_of

import saecli
from saecli.model import TINY_GEMMA2
from saecli.show.prompts import write_prompt_page

pytestmark = needs_browser


def test_pages_open_from_disk_and_fetch_only_the_latents_opened(open_page: Any):
    opened = open_page()
    uri = opened.folder.as_uri()
    assert opened.page.inner_text("h1") == "run"
    assert opened.page.locator("svg").count() == 1
    assert "Every row has 14 active latents." in opened.page.inner_text("#overview")
    files = [url for url in opened.asked if not url.startswith("data:")]
    assert files == [f"{uri}/index.html"]
    opened.page.click("tbody a >> text='17'")
    opened.page.wait_for_selector(".example")
    files = [url for url in opened.asked if not url.startswith("data:")]
    assert files == [f"{uri}/index.html", f"{uri}/latents/00001.js"]
    assert opened.page.inner_text("h1:visible") == "Latent 17"
    assert opened.page.locator(".example").count() == 12
    link = opened.page.locator("a", has_text="Neuronpedia")
    assert link.get_attribute("href") == f"https://www.neuronpedia.org/{SOURCE}/17"
    for side in ("up", "down"):
        assert opened.page.locator(f".ranked .{side}").count() == 10
    opened.page.click("a[rel=up]")
    opened.page.wait_for_selector(".latents")
    assert opened.said == []


def test_texts_are_shown_as_text_whatever_is_in_them(open_page: Any):
    opened = open_page()
    read = ""
    for latent in range(20):
        opened.page.goto((opened.folder / "index.html").as_uri() + f"#latent/{latent}")
        opened.page.wait_for_selector(".example")
        assert opened.page.inner_text("h1:visible") == f"Latent {latent}"
        read += opened.page.locator("#latent").text_content()
    for word in NASTY:
        shown = word.replace("\u2028", "").replace("\u202e", "")
        assert shown in read
    assert opened.page.locator("img").count() == 0
    assert opened.said == []


def test_search_finds_tokens_and_numbers(open_page: Any):
    opened = open_page("many")
    index = index_of(opened.folder)["latents"]
    measures = opened.page.locator(".entries").first.text_content()
    assert "prefixes 0 latents64" in measures and "[object" not in measures
    opened.page.fill("#search", "w7")
    columns = zip(index["tokens"], index["snippets"], index["promoted"], strict=True)
    texts = [
        "\n".join([*tokens, "".join(snippet), *promoted]) for tokens, snippet, promoted in columns
    ]
    expected = [latent for latent in interesting(index) if "w7" in texts[latent]]
    assert [int(row[0]) for row in opened.rows()] == expected[:50]
    assert opened.page.inner_text("#count") == f"1–{min(50, len(expected))} of {len(expected):,}"
    opened.page.fill("#search", "4001")
    assert "4001" in [row[0] for row in opened.rows()]
    opened.page.fill("#search", "no such text")
    assert (opened.rows(), opened.page.inner_text("#count")) == ([], "no latent matches")
    opened.page.fill("#search", "")
    opened.page.select_option("#kind", "silent ones")
    silent = int((np.array(index["frequency"]) == 0).sum())
    assert opened.page.inner_text("#count").endswith(f"of {silent:,}" if silent else "matches")
    assert opened.said == []


@pytest.mark.parametrize(("column", "name"), [(1, "frequency"), (4, "interest")])
def test_columns_sort_all_latents_both_ways(open_page: Any, column: int, name: str):
    opened = open_page("many")
    values = np.array(index_of(opened.folder)["latents"][name])
    head = opened.page.locator("th button").nth(column)
    opened.page.locator("th button").nth(0).click()
    for direction, word in ((-1, "descending"), (1, "ascending")):
        head.click()
        assert opened.page.locator("th").nth(column).get_attribute("aria-sort") == word
        order = np.argsort(direction * values, kind="stable")
        assert [int(row[0]) for row in opened.rows()] == order[:50].tolist()
    opened.page.click("[aria-label='last page']")
    assert int(opened.rows()[-1][0]) == order[-1]
    opened.page.click("[aria-label='previous page']")
    assert len(opened.rows()) == 50


def test_verdicts_are_a_column_that_is_searched_and_a_line_of_a_latents_page(open_page: Any):
    opened = open_page("many")
    opened.page.fill("#search", VERDICT)
    ((latent, *cells),) = opened.rows()
    assert latent == str(TRIED) and VERDICT in cells
    opened.page.click(f"tbody a >> text='{TRIED}'")
    opened.page.wait_for_selector(f".tiles .class >> text='{VERDICT}'")
    assert opened.said == []


def test_everything_can_be_done_with_the_keyboard(open_page: Any):
    opened = open_page()
    opened.page.keyboard.press("/")
    assert opened.page.evaluate("document.activeElement.id") == "search"
    opened.page.keyboard.type("13")
    assert "13" in [row[0] for row in opened.rows()]
    opened.page.fill("#search", "")
    fourth, fifth = interesting(index_of(opened.folder)["latents"])[4:6]
    opened.page.locator("tbody a").nth(4).focus()
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector(".example")
    assert opened.page.inner_text("h1:visible") == f"Latent {fourth}"
    assert opened.page.evaluate("document.activeElement.textContent") == f"Latent {fourth}"
    opened.page.keyboard.press("ArrowRight")
    opened.page.wait_for_selector(f"h1:visible >> text='Latent {fifth}'")
    opened.page.keyboard.press("ArrowLeft")
    opened.page.wait_for_selector(f"h1:visible >> text='Latent {fourth}'")
    opened.page.keyboard.press("g")
    opened.page.keyboard.type("17")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector("h1:visible >> text='Latent 17'")
    opened.page.keyboard.press("Escape")
    opened.page.wait_for_selector(".latents")


def test_latents_of_a_crosscoder_are_filtered_by_class(open_page: Any):
    opened = open_page("two")
    index = index_of(opened.folder)["latents"]
    assert "layer 3, resid_post of model + layer 3, resid_post of other" in opened.page.inner_text(
        "header:visible"
    )
    assert len(index["classes"]) > 1
    for number, name in enumerate(index["classes"]):
        opened.page.select_option("#kind", name)
        expected = [latent for latent in interesting(index) if index["class"][latent] == number]
        assert [(int(row[0]), row[5]) for row in opened.rows()] == [(own, name) for own in expected]
    opened.page.locator("tbody a").first.click()
    opened.page.wait_for_selector(f".class >> text='{name}'")
    measures = opened.page.locator(".entries").first.text_content()
    assert "dead fraction–" in measures
    assert opened.said == []


def test_a_prompts_tokens_show_their_latents_and_a_click_shades_it(tmp_path: Path, browser: Any):
    sae, page_path = steerable(d_in=128), tmp_path / "page.html"
    sae.metadata = {"model": TINY_GEMMA2, "layer": 1, "site": "resid_post"}
    document = saecli.read(sae, "Return </script><img src=x> the\nnumber", latents="listed")
    write_prompt_page(page_path, document)
    context, said, asked = browser.new_context(), list[str](), list[str]()
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_path.as_uri())
    assert page.locator(".token").count() == len(document["tokens"])
    assert page.locator(".words img").count() == 0
    page.locator(".token").nth(2).hover()
    listed = [int(one.inner_text()) for one in page.locator(".peek .pick").all()]
    assert listed == [entry["latent"] for entry in document["tokens"][2]["latents"]]
    page.locator(".peek .pick").nth(1).click()
    (chosen,) = (one for one in document["latents"] if one["latent"] == listed[1])
    assert page.locator(".token.fires").count() == chosen["fires_on"]
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    strongest = document["tokens"][3]["latents"][0]["latent"]
    assert f"latent {strongest}" in page.inner_text(".shading")
    assert said == [] and asked == [page_path.as_uri()]
    context.close()


def test_a_prompts_page_shades_by_attribution_and_by_code(tmp_path: Path, browser: Any):
    sae, page_path = steerable(d_in=128), tmp_path / "page.html"
    sae.metadata = {"model": TINY_GEMMA2, "layer": 1, "site": "resid_post"}
    asked = {"why": " in", "against": " the", "top": 4}
    document = saecli.read(sae, "Return the number of items", latents="listed", **asked)
    write_prompt_page(page_path, document)
    context, said = browser.new_context(), list[str]()
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(page_path.as_uri())
    signs = [np.sign(token["attribution"]) for token in document["tokens"]]
    assert page.locator(".token.fires").count() == np.count_nonzero(signs)
    assert page.locator(".token.negative").count() == signs.count(-1)
    strongest = document["why"]["latents"][0]
    card = page.locator(".card", has_text="Why ␣in, not ␣the")
    assert card.locator("tbody tr").count() == 4 + 3
    card.locator(".pick").first.click()
    assert f"attribution to latent {strongest['latent']}" in page.inner_text(".shading")
    below = sum(value < 0 for value in strongest["attributions"])
    assert page.locator(".token.negative").count() == below
    page.get_by_role("button", name="by code").click()
    assert page.inner_text(".shading").startswith(f"shaded by latent {strongest['latent']}")
    assert page.locator(".token.fires").count() == strongest["fires_on"]
    assert said == []
    context.close()
