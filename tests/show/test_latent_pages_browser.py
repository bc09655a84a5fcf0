"""What a latent's page offers in a real browser: texts of several kinds, notes, links; see `test_pages_browser`."""

import json
from pathlib import Path
from typing import Any

import pytest
from opened_pages import SOURCE, needs_browser
from reports import pages_of

pytestmark = needs_browser


def test_texts_unfold_from_whole_words_about_the_peak_to_all_that_is_kept(open_page: Any):
    one = open_page(at="#latent/3")
    one.page.wait_for_selector(".example")
    examples = pages_of(one.folder)[3]["examples"]
    example = next(one for one in examples if 13 < one["peak"] < 22)
    row = one.page.locator(".example").nth(examples.index(example))
    begin, end = example["peak"] - 12, example["peak"] + 7  # each token begins with a space, so is a word
    words, more = row.locator(".words"), row.locator(".more")

    def shown() -> list[str]:
        return words.evaluate("(words) => [...words.querySelectorAll('span')].filter((span) => !span.className.match("
                              "'rest|dots') && span.checkVisibility()).map((span) => span.textContent)")

    folded = shown()
    assert len(folded) == end - begin
    assert (more.inner_text(), more.get_attribute("aria-expanded")) == ("more", "false")
    more.click()
    assert len(shown()) == 30
    assert shown()[begin:end] == folded
    assert (more.inner_text(), more.get_attribute("aria-expanded")) == ("less", "true")
    words.click()
    assert shown() == folded
    one.page.check("#unfolded")
    assert len(shown()) == 30
    one.page.click("a[rel=next]")
    one.page.wait_for_selector(".example")
    assert one.page.locator("[aria-expanded=false]").count() == 0  # unfolded on the next page too
    assert one.said == []


def test_texts_by_strength_are_the_random_ones_in_fifths_from_strong_to_weak(open_page: Any):
    one = open_page(at="#latent/3")
    one.page.wait_for_selector(".example")
    codes = [example["code"] for example in pages_of(one.folder)[3]["samples"]]
    ordered = sorted(codes, key=abs, reverse=True)

    def listed() -> list[float]:
        return [float(text) for text in one.page.locator(".example .value").all_inner_texts()]

    one.page.select_option("#texts", "at random")
    assert listed() == pytest.approx(codes, rel=1e-3)
    one.page.select_option("#texts", "by strength")
    assert listed() == pytest.approx(ordered, rel=1e-3)
    heads = one.page.locator(".fifth").all_inner_texts()
    assert [head.split()[0] for head in heads] == ["Strongest", "Second", "Middle", "Fourth", "Weakest"]
    ends = [float(number) for head in heads for number in head.split(": ")[1].split(" to ")[::-1]]
    assert ends == pytest.approx([abs(ordered[at]) for at in range(15) if at % 3 != 1], rel=1e-2)
    assert one.said == []


def test_notes_outlast_the_window_are_found_and_exported_with_all_others(open_page: Any, tmp_path: Path):
    one = open_page(at="#latent/3")
    for latent, note in ((3, "<b>names</b>"), (11, "numbers\nand more"), (5, "none")):
        one.page.fill("#latent .jump", str(latent))
        one.page.keyboard.press("Enter")
        one.page.wait_for_selector(".example")
        one.page.fill("#note", note)
    one.page.fill("#note", "")
    other = one.page.context.new_page()
    other.goto((one.folder / "index.html").as_uri())
    other.select_option("#kind", "those with a note")
    assert other.locator(".latents tbody tr").count() == 2
    other.fill("#search", "Numbers")
    assert other.locator(".latents tbody a").all_inner_texts() == ["11"]
    with other.expect_download() as waiting:
        other.click("text=Export 2 notes")
    assert waiting.value.suggested_filename == "notes-run.json"
    waiting.value.save_as(tmp_path / "notes.json")
    saved = json.loads((tmp_path / "notes.json").read_text(encoding="utf-8"))
    assert saved["notes"] == [{"latent": 3, "note": "<b>names</b>"}, {"latent": 11, "note": "numbers\nand more"}]
    assert (saved["run"], saved["data"]) == ("run", "texts")
    other.click(".latents tbody a")
    assert other.input_value("#note") == "numbers\nand more"
    another_sae = open_page("many")
    assert not another_sae.page.locator("#export").is_visible()
    assert one.said == []


def test_a_note_that_the_browser_does_not_keep_is_said_so_and_can_be_exported(open_page: Any):
    one = open_page()
    one.page.add_init_script("""Object.defineProperty(window, "localStorage", { get() {
        throw new DOMException("refused", "SecurityError"); } })""")
    one.page.reload()
    one.page.locator("tbody a").first.click()
    one.page.fill("#note", "mine")
    assert "does not keep it" in one.page.inner_text("#latent")
    one.page.click("a[rel=up]")
    assert one.page.inner_text("#export") == "Export 1 note"
    assert one.said == []


def test_a_latent_has_a_link_to_its_page_on_neuronpedia_and_numbers_out_of_range_are_not_gone_to(open_page: Any):
    one = open_page(at="#latent/3")
    link = one.page.locator("a", has_text="Neuronpedia")
    assert link.get_attribute("href") == f"https://www.neuronpedia.org/{SOURCE}/3"
    assert link.get_attribute("rel") == "noreferrer"
    for wrong in ("20", "-1", "1.5", ""):
        one.page.fill("#latent .jump", wrong)
        one.page.locator("#latent .jump").press("Enter")
        assert one.page.inner_text("h1:visible") == "Latent 3"
    other = open_page("many", at="#latent/3")
    assert other.page.inner_text("h1:visible") == "Latent 3"
    assert other.page.locator("a", has_text="Neuronpedia").count() == 0


def test_logits_are_drawn_as_counted_and_partners_with_phi_and_lift(open_page: Any):
    one = open_page(at="#latent/3")
    one.page.wait_for_selector(".example")
    page = pages_of(one.folder)[3]
    titles = one.page.locator("[aria-label='histogram of logits'] .bar title").all_text_contents()
    assert [int(title.split(": ")[1].split()[0]) for title in titles] == page["logits"]
    assert float(titles[0].split(" to ")[0]) == pytest.approx(page["suppressed"][0][1], rel=1e-2)
    cards = one.page.locator(".near-list .card")
    rows = [text.split("\n") for text in cards.nth(1).locator("li").all_inner_texts()]
    assert [int(row[0]) for row in rows] == [other for other, _, _ in page["together"]]
    phi, lift = zip(*(row[1].split(" ×") for row in rows), strict=True)
    assert list(map(float, phi)) == pytest.approx([value for _, value, _ in page["together"]], abs=1e-3)
    assert list(map(float, lift)) == pytest.approx([value for _, _, value in page["together"]], rel=0.06)
