"""`sae serve` in a real browser: what a reader clicks, by pointer and by keyboard alone."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from opened_pages import needs_browser, open_browser
from serving import Server, served

from saecli.model import TINY_GEMMA2

pytestmark = needs_browser
TEXT = "def join(parts): return the parts of a path"
HOSTILE = "</script><img src=x onerror=fail()>"


@dataclass
class Visit:
    """A page of the server, and what it said on its console."""

    page: Any
    server: Server
    said: list[str] = field(default_factory=list)

    def open(self, state: str) -> None:
        self.page.goto("about:blank")
        self.page.goto(f"{self.server.url}/#{state}")

    def save(self, path: Path) -> None:
        with self.page.expect_download() as download:
            self.page.click("text=Save as a file")
        download.value.save_as(path)

    def read(self, text: str = TEXT) -> None:
        self.open("text")
        self.page.fill("#prompt", text)
        self.page.click("text=Read")
        self.page.wait_for_selector(".token.fires")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def visit(server: Server) -> Iterator[Visit]:
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        visit = Visit(page, server)
        page.on("console", lambda message: visit.said.append(message.text))
        page.on("pageerror", lambda error: visit.said.append(str(error)))
        yield visit
        assert visit.said == []


def test_a_text_is_shaded_and_a_token_opens_a_latent_and_asks_why(visit: Visit):
    page = visit.page
    visit.read()
    assert page.locator(".token.fires").count() > 5
    page.locator(".token.fires").nth(3).hover()
    peek = page.locator(".peek")
    peek.locator(".pick").first.click()
    assert "shaded by latent" in page.inner_text(".shading")
    address = page.url
    assert "text=def%20join" in address and "shade=" in address
    peek.locator("text=why this token?").click()
    page.wait_for_selector("text=attributed to latents")
    visit.open(address.partition("#")[2])  # the same again from the address alone
    page.wait_for_selector(".token.fires")
    assert "shaded by latent" in page.inner_text(".shading")
    page.locator(".token").nth(4).hover()
    peek.locator("a").first.click()
    page.wait_for_selector(".example")
    assert page.inner_text("h1:visible").startswith("Latent ")


def test_a_text_is_read_again_without_the_token_of_a_link(visit: Visit):
    page = visit.page
    visit.read()
    page.locator(".token.fires").nth(3).hover()
    page.click("text=why this token?")
    page.wait_for_selector("h2:has-text('Why')")
    page.click("button:text-is('Read')")
    page.wait_for_selector("h2:has-text('Why')", state="hidden")
    page.fill("[aria-label='next token']", "5")
    page.click("button:text-is('Read')")
    page.wait_for_selector("h2:text-is('Why 5')")
    page.reload()
    page.wait_for_selector("h2:text-is('Why 5')")


def test_an_answer_that_comes_late_is_not_shown(visit: Visit):
    page = visit.page
    visit.open("text")
    page.wait_for_selector("#prompt")
    for late in ("runs", "latents?run=own"):
        page.evaluate("late => { location.hash = late; location.hash = 'text'; }", f"#{late}")
        page.wait_for_timeout(1500)
        assert page.locator("h1:visible").all_inner_texts() == ["Text"]


def test_marked_tokens_have_latents_together(visit: Visit):
    page = visit.page
    visit.read()
    page.locator(".token").nth(2).click()
    page.locator(".token").nth(5).click(modifiers=["Shift"])
    peek = page.locator(".peek")
    assert "4 tokens: latents by the sum of their codes" in peek.inner_text()
    latent = int(peek.locator(".pick").first.inner_text())
    tokens = visit.server.post("read", {"run": TINY_GEMMA2, "text": TEXT}).json()["tokens"][2:6]
    codes = [one["code"] for token in tokens for one in token["latents"] if one["latent"] == latent]
    assert float(peek.locator(".value").first.inner_text()) == pytest.approx(sum(codes), rel=0.01)
    page.keyboard.press("Shift+ArrowLeft")
    assert "3 tokens" in peek.inner_text() and page.locator(".token.marked").count() == 3


def test_two_texts_and_two_runs(visit: Visit):
    page = visit.page
    visit.open(f"text?text={TEXT}&compare=class%20Path&beside=own")
    page.wait_for_selector("text=Latents that differ most")
    assert page.locator("h2", has_text="Latents that differ most").count() == 2
    assert page.locator("h2", has_text="Compared with").count() == 2


def test_latents_are_searched_opened_labelled_and_steered(visit: Visit):
    page = visit.page
    visit.open("latents?run=own")
    page.wait_for_selector("tbody tr.open")
    token = page.locator("tbody .chip").first.inner_text()
    page.fill("#search", token.strip("␣"))
    assert page.locator("tbody tr.open").count() >= 1
    page.locator("tbody a").first.click()
    page.wait_for_selector(".example")
    page.fill("[aria-label=label]", HOSTILE)
    page.click("button:text-is('Label')")
    page.wait_for_selector("text=kept in labels.json")
    assert page.inner_text("#latent .about").startswith(HOSTILE)
    page.click("a[rel=up]")
    assert page.locator("tbody", has_text=HOSTILE).count() == 1
    assert page.locator("img").count() == 0
    page.go_back()
    page.wait_for_selector(".example")
    page.fill("[aria-label=label]", "")
    page.click("button:text-is('Label')")
    page.wait_for_selector("text=removed")
    page.click("a:has-text('Steer') >> nth=-1")
    page.fill("#prompt", TEXT)
    page.fill("[aria-label='latent to change']", "9")
    page.keyboard.press("Enter")  # takes the latent in, and continues the text
    assert page.locator(".edit").count() == 2
    page.wait_for_selector("text=The first token")
    page.wait_for_selector(".sides a.token")
    plain = page.locator(".sides .words").nth(0).inner_text()
    assert plain.startswith(TEXT) and len(plain) > len(TEXT)


def test_a_slider_changes_the_address_and_stop_ends_a_text(visit: Visit):
    page = visit.page
    edits = json.dumps([{"latent": 100, "method": "add", "scale": 12}])
    visit.open(f"steer?text={TEXT}&edits={edits}&most=100&go=true")
    page.wait_for_selector("text=The first token")
    page.click("text=Stop")
    page.wait_for_selector("text=Stop", state="hidden")
    words = page.locator(".sides .words").nth(1).inner_text()
    page.wait_for_timeout(300)
    assert page.locator(".sides .words").nth(1).inner_text() == words
    page.focus("input[type=range]")
    page.keyboard.press("ArrowRight")
    assert "%2212%22" not in page.url and "scale%22%3A12.2" in page.url


def test_the_keyboard_alone_reads_a_text_and_goes_through_its_tokens(visit: Visit):
    page = visit.page
    visit.open("text")
    page.wait_for_selector("#prompt")
    while page.evaluate("document.activeElement.id") != "prompt":
        page.keyboard.press("Tab")
    page.keyboard.type("def f")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".token.fires")
    while not page.evaluate("document.activeElement.classList.contains('token')"):
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert "shaded by latent" in page.inner_text(".shading")
    page.keyboard.press("Escape")
    assert "each token's strongest" in page.inner_text(".shading")


def test_every_control_has_a_name_and_fits_a_narrow_window(visit: Visit):
    page = visit.page
    unnamed = """[...document.querySelectorAll('input, select, textarea, button, a')].filter((one) =>
        one.offsetParent && !one.textContent.trim() && !one.getAttribute('aria-label') && !one.labels?.length
        ).map((one) => one.outerHTML)"""
    for width in (320, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        states = {
            f"text?text={TEXT}": ".token.fires",
            "latents?run=own": "tbody tr.open",
            "latent/3?run=own": ".example",
            'steer?edits=[{"latent":3,"method":"add","scale":5}]': "input[type=range]",
            "runs": "text=Runs of the home",
        }
        for state, there in states.items():
            visit.open(state)
            page.wait_for_selector(there)
            assert page.evaluate(unnamed) == [], state
            assert page.evaluate("document.documentElement.scrollWidth") <= width, state


def test_a_page_is_saved_as_one_file_that_shows_the_same(visit: Visit, tmp_path: Path):
    page = visit.page
    visit.read()
    page.locator(".token.fires").nth(3).hover()
    page.locator(".peek .pick").first.click()
    page.mouse.move(0, 0)
    shown = page.inner_text(".texts")
    path = tmp_path / "saved.html"
    visit.save(path)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector(".token.fires")
    assert page.inner_text(".texts") == shown
    assert "shaded by latent" in page.inner_text(".shading")
    assert [url for url in asked if not url.startswith(("data:", "file:"))] == []
    visit.open("latent/3?run=own")
    page.wait_for_selector(".example")
    texts = page.inner_text(".strongest")
    visit.save(path)
    page.goto(path.as_uri())
    page.wait_for_selector(".example")
    assert page.inner_text(".strongest") == texts
    page.click("a[rel=next]")
    page.wait_for_selector("text=This page was saved without that")
    edits = json.dumps([{"latent": 100, "method": "add", "scale": 12}])
    visit.open(f"steer?text={TEXT}&edits={edits}&most=8&go=true")
    page.wait_for_selector(".sides a.token")
    words = page.inner_text(".sides")
    page.focus("input[type=range]")
    page.keyboard.press("ArrowRight")  # what is saved is what was answered
    visit.save(path)
    page.goto(path.as_uri())
    page.wait_for_selector(".sides a.token")
    assert page.inner_text(".sides") == words
    assert page.input_value("input[type=range]") == "12"


def test_what_goes_wrong_is_said(visit: Visit):
    page = visit.page
    visit.open(f"text?text={TEXT}&why=several%20words%20here")
    page.wait_for_selector("text=must be one token")
    visit.open("constructor")
    page.wait_for_selector("text=There is no such view")
    visit.open("latents")  # of the bundled SAE, on the rows given
    page.wait_for_selector("tbody tr.open")
    visit.open(f"latent/3?run={TINY_GEMMA2}")
    page.wait_for_selector(".example")
    visit.open("steer?edits=none")
    page.wait_for_selector("[role=alert]")
    visit.said.clear()  # a status of 422 is in the console
