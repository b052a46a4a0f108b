"""The page, in a real browser and with a real server: skipped where there is no Chromium (``CHROMIUM`` names another).

Screenshots go to the directory that ``SCREENSHOTS`` names, of the server at ``SCREENSHOTS_URL`` if that is set.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from bayeslora.predict.calibrate import Calibration
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.trained import TrainedModel
from bayeslora.server.app import create_app
from bayeslora.server.engine import Engine
from bayeslora.server.limits import Limits
from bayeslora.server.web import FILES, FOLDER
from server.live import ASKED, NAME, held_up, live, wait_for

pytestmark = pytest.mark.system

Open = Callable[..., Any]
SECONDS = 15
STATUS = "Failed to load resource"  # what the browser itself says of an answer that is an error


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("there is no Chromium here: install it, or name one with CHROMIUM")
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"] if root else [])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens the page; at the end nothing must have been asked of others, and nothing have failed in its scripts."""
    seen: list[tuple[str, Any, list[str], list[str]]] = []

    def opened(url: str, *, ready: bool = True, **settings: Any) -> Any:
        context = browser.new_context(**settings)
        context.set_default_timeout(1000 * SECONDS)
        page = context.new_page()
        errors: list[str] = []
        asked: list[str] = []
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        page.errors = errors
        seen.append((url, context, errors, asked))
        if ready:
            page.wait_for_selector("#metrics div")
        return page

    yield opened
    for url, context, errors, asked in seen:
        context.close()
        assert all(one.startswith(f"{url}/") for one in asked)
        assert not [error for error in errors if STATUS not in error]


def words(page: Any, selector: str) -> str:
    """With ordinary spaces."""
    return page.locator(selector).inner_text().replace("\u00a0", " ")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def fill_in(page: Any, question: str = ASKED["question"], choices: Any = ASKED["choices"]) -> None:
    page.fill("#question", question)
    for k, choice in enumerate(choices, start=1):
        if k > page.locator("#rows li").count():
            page.click("#add")
        page.get_by_label(f"Choice {k}", exact=True).fill(choice)


def ask(page: Any) -> None:
    fill_in(page)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".bars")


def write(page: Any, prompt: str, tokens: int) -> None:
    page.get_by_text("Free text").click()
    page.fill("#prompt", prompt)
    page.fill("#tokens", str(tokens))
    page.get_by_role("button", name="Write", exact=True).click()


# Questions ------------------------------------------------------------------------------------------------------------


def test_a_question_is_asked_with_the_keyboard_alone(open_page: Open, url: str) -> None:
    page = open_page(url)
    for _ in range(9):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "question":
            break
    page.keyboard.type(ASKED["question"])
    page.keyboard.press("Tab")
    page.keyboard.type("yes")
    page.keyboard.press("Tab")
    page.keyboard.type("no")
    page.keyboard.press("Enter")
    page.keyboard.type("who knows")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".bars")
    assert page.locator("#rows li").count() == 3
    want = httpx.post(f"{url}/v1/choices", json={**ASKED, "deterministic": True}).json()
    bars = page.locator(".bars li")
    assert bars.locator(".name").all_inner_texts() == want["choices"]
    for name, values in ((".share", want["probabilities"]), (".mean", want["deterministic"])):
        shown = [text.replace("\u00a0", " ") for text in bars.locator(name).all_inner_texts()]
        assert [text.removeprefix("mean ") for text in shown] == [percent(value) for value in values]
    assert bars.first.locator(".tick").count() == len(want["draws"]) == 3
    doubt = words(page, ".doubt")
    assert f"{want['aleatoric']:.3f} nats aleatoric" in doubt and f"{want['epistemic']:.3f} nats epistemic" in doubt
    assert page.locator("#set .chip").all_inner_texts() == want["prediction_set"]
    verdict = words(page, "#verdict")
    assert verdict.startswith("Not sure enough" if want["abstains"] else f"{want['answer']}\n")
    assert percent(want["confidence"]) in verdict
    assert not page.errors


def test_draws_are_shown_at_the_temperature_of_the_average(open_page: Open, url: str, trained: TrainedModel) -> None:
    page = open_page(url)
    page.fill("#samples", "1")
    ask(page)
    widths = page.evaluate("[...document.querySelectorAll('.track .fill')].map(e => e.style.width)")
    ticks = page.evaluate("[...document.querySelectorAll('.tick')].map(e => e.style.left)")
    assert trained.calibration.temperature != 1
    assert [float(w[:-1]) for w in widths] == pytest.approx([float(t[:-1]) for t in ticks], abs=1e-3)
    assert "choose two draws or more" in words(page, ".doubt")


def test_rows_come_and_go(open_page: Open, url: str) -> None:
    page = open_page(url)
    assert page.get_by_label("Remove choice 1").is_disabled()
    page.click("#add")
    page.keyboard.type("third")
    page.get_by_label("Remove choice 1").click()
    assert page.locator("#rows input").last.input_value() == "third"
    for _ in range(30):
        page.locator("#rows input").last.press("Enter")
    assert page.locator("#rows li").count() == 26 and page.locator("#add").is_disabled()
    page.click("#example")
    assert page.locator("#rows li").count() == 3


def test_what_is_missing_is_said_and_pointed_at(open_page: Open, url: str) -> None:
    page = open_page(url)
    page.get_by_role("button", name="Ask", exact=True).click()
    assert "Write a question first" in words(page, "#problem")
    assert page.evaluate("document.activeElement.id") == "question"
    page.keyboard.type("Is it?")
    page.keyboard.press("Control+Enter")
    assert "at least two choices" in words(page, "#problem")
    assert page.evaluate("document.activeElement.ariaLabel") == "Choice 1"
    fill_in(page, "Is it?", ["yes", "yes"])
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#problem:has-text('two choices are equal')")


# The threshold and what was measured ----------------------------------------------------------------------------------


def test_the_threshold_decides(open_page: Open, url: str, trained: TrainedModel) -> None:
    page = open_page(url)
    seen = httpx.get(f"{url}/v1/evaluation").json()
    assert percent(trained.calibration.threshold or 0) == words(page, "#threshold-value")
    assert page.locator("#threshold-reset").is_hidden()
    ask(page)
    before = words(page, "#verdict")
    slider = page.get_by_label("Answer only if at least this sure")
    slider.press("End")
    assert words(page, "#threshold-value") == "100.0 %" and words(page, "#verdict").startswith("Not sure enough")
    assert "keep quiet" in words(page, "#comparison") and "None of the 8 questions" in words(page, "#threshold-words")
    assert page.locator("#curve .point").count() == 0
    slider.press("Home")
    assert words(page, "#verdict").endswith(" sure") and "would answer" in words(page, "#comparison")
    last = seen["risk_coverage"][-1]
    assert f"answers 100.0 %, and {percent(last['error_rate'])} of those" in words(page, "#threshold-words")
    slider.fill("0.5")
    point = [one for one in seen["risk_coverage"] if one["threshold"] >= 0.5][-1]
    told = f"answers {percent(point['coverage'])}, and {percent(point['error_rate'])} of those answers are wrong"
    assert told in words(page, "#threshold-words")
    marked = page.locator("#curve svg").get_attribute("aria-label").replace("\u00a0", " ")
    assert f"{percent(point['error_rate'])} wrong at {percent(point['coverage'])} answered" in marked
    page.click("#threshold-reset")
    assert words(page, "#verdict") == before


def test_figures_are_those_of_the_evaluation(open_page: Open, url: str) -> None:
    page = open_page(url)
    seen = httpx.get(f"{url}/v1/evaluation").json()
    assert words(page, "#metric-acc") == percent(seen["metrics"]["acc"])
    assert words(page, "#metric-ece") == f"{seen['metrics']['ece']:.3f}"
    assert page.locator("#reliability .bin").count() == sum(count > 0 for count in seen["reliability"]["count"])
    assert page.locator("#units").is_visible() != seen["as_served"]
    assert "8 questions of the test split" in words(page, "#measured") and page.title().startswith(NAME)


def test_a_run_that_was_never_measured(open_page: Open, trained: TrainedModel, run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    bare = replace(trained, directory=RunDirectory(tmp_path), calibration=Calibration())
    with live(create_app(Engine(bare, Limits()), NAME)) as url:
        page = open_page(url, ready=False)
        page.wait_for_selector("text=This run has left no figures behind.")
        assert "not known what a threshold would give" in words(page, "#threshold-words")
        assert "No threshold was calibrated" in words(page, "#threshold-source") and page.locator("#units").is_hidden()
        ask(page)
        assert words(page, "#verdict").endswith(" sure") and page.locator("#set").count() == 0


# Text -----------------------------------------------------------------------------------------------------------------


def test_text_is_written_and_shaded(open_page: Open, url: str) -> None:
    page = open_page(url)
    body = {"prompt": "red", "max_tokens": 12, "temperature": 0}
    want = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]
    write(page, "red", 12)
    page.wait_for_selector("#text-result details")
    assert page.locator("#written").text_content() == "red" + want["text"]
    tokens = want["confidence"]["tokens"]
    assert f"{len(tokens)} tokens from 3 draws" in words(page, "#verdict")
    assert f"{want['confidence']['mutual_information']:.3f} nats" in words(page, "#verdict")
    title = page.locator("#written .token").first.get_attribute("title").replace("\u00a0", " ")
    assert percent(tokens[0]["probability"]) in title and f"{tokens[0]['epistemic']:.3f} epistemic" in title
    page.click("text=All tokens as a table")
    assert page.locator("#text-result tbody tr").count() == len(tokens)
    for kind, bounds in (("entropy", (0.1, 0.5, 1, 2)), ("epistemic", (0.01, 0.05, 0.1, 0.3))):
        page.select_option("#shade", kind)
        shade = page.locator("#written .token").first.get_attribute("data-shade")
        assert int(shade) == sum(tokens[0][kind] >= bound for bound in bounds)
    assert page.locator("#threshold-card").is_hidden() and not page.errors


def test_a_text_is_compared_with_what_the_draws_write(open_page: Open, url: str) -> None:
    page = open_page(url)
    body = {"prompt": "red", "max_tokens": 12, "temperature": 0, "agreement": True}
    want = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["confidence"]
    write(page, "red", 12)
    page.wait_for_selector("#others")
    share = f"{100 * want['agreement']:.0f} %"
    assert f"{share} of the draws write the same by themselves" in words(page, "#others")
    assert page.locator("#others li").count() == len(want["alternatives"])
    for alternative in want["alternatives"]:
        assert f"{100 * alternative['share']:.0f} %" in words(page, "#others")
    page.uncheck("#agreement")
    write(page, "red", 12)
    page.wait_for_selector("#text-result details")
    assert page.locator("#others").count() == 0 and not page.errors


def test_a_chat_is_written(open_page: Open, url: str) -> None:
    page = open_page(url)
    page.get_by_text("Free text").click()
    page.get_by_label("Reply to it as in a chat").check()
    write(page, "Is it?", 4)
    page.wait_for_selector("#text-result details")
    messages = [{"role": "user", "content": "Is it?"}]
    want = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 4, "temperature": 0}
    ).json()
    assert page.locator("#written").text_content() == want["choices"][0]["message"]["content"]


def test_tokens_come_one_by_one_and_can_be_stopped(open_page: Open, trained: TrainedModel) -> None:
    with held_up(trained) as (engine, _, client):
        engine.delay = 0.05
        engine.go.set()
        page = open_page(str(client.base_url).rstrip("/"))
        write(page, "red", 400)
        page.locator("#written .token").nth(3).wait_for()
        assert page.locator("#result").get_attribute("aria-busy") == "true"
        page.click("#stop")
        page.wait_for_selector("#verdict:has-text('Stopped.')")
        assert page.locator("#stop").is_disabled() and page.locator("#text-result details").count() == 1


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_tried_again_when_the_server_wants_it(open_page: Open, trained: TrainedModel) -> None:
    with held_up(trained, queue=1) as (engine, worker, client), ThreadPoolExecutor(2) as pool:
        page = open_page(str(client.base_url).rstrip("/"))
        taken = [pool.submit(client.post, "/v1/choices", json=ASKED)]
        assert engine.begun.wait(SECONDS)
        taken += [pool.submit(client.post, "/v1/choices", json=ASKED)]
        wait_for(lambda: worker.depth == 1)
        fill_in(page)
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("text=Try again in 1 s")
        assert "Many questions wait" in words(page, "#problem") and page.locator("#problem button").is_disabled()
        engine.go.set()
        assert [future.result().status_code for future in taken] == [200, 200]
        page.click("#problem button:enabled")
        page.wait_for_selector(".bars")
        assert page.locator("#problem").is_hidden()


def test_an_answer_that_takes_too_long_is_told(open_page: Open, trained: TrainedModel) -> None:
    with held_up(trained, timeout=2) as (_, _, client):
        page = open_page(str(client.base_url).rstrip("/"))
        fill_in(page)
        page.keyboard.press("Control+Enter")
        assert words(page, "#verdict") == "Asking …"
        page.wait_for_selector("#problem:visible")
        assert "took too long" in words(page, "#problem") and not words(page, "#verdict")


def test_a_server_that_is_gone_is_told(open_page: Open, trained: TrainedModel) -> None:
    with live(create_app(Engine(trained, Limits()), NAME)) as url:
        page = open_page(url)
    fill_in(page)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#problem:visible")
    assert "cannot be reached" in words(page, "#problem") and page.locator("#problem button").is_enabled()


def test_a_token_is_asked_for_and_kept(open_page: Open, trained: TrainedModel) -> None:
    with live(create_app(Engine(trained, Limits()), NAME, "sesame-öffne")) as url:
        page = open_page(url, ready=False)
        page.get_by_label("Token", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=did not accept this token")
        page.get_by_label("Token", exact=True).fill("sesame-öffne")
        page.keyboard.press("Enter")
        page.wait_for_selector("#metrics div")
        ask(page)
        page.reload()
        page.wait_for_selector("#metrics div")
        assert page.locator("dialog").is_hidden()
        page.evaluate("sessionStorage.clear()")
        page.reload()
        page.wait_for_selector("dialog[open]")
        page.keyboard.press("Escape")
        page.wait_for_selector("text=wants a token, and has none")
        page.click("text=Try again")
        page.wait_for_selector("dialog[open]")


# How it looks ---------------------------------------------------------------------------------------------------------

NAMES = """() => [...document.querySelectorAll("button, input, select, textarea, svg")]
    .filter((e) => !(e.labels?.length || e.ariaLabel || e.innerText?.trim() || e.textContent.trim())).map((e) => e.outerHTML)"""

CONTRASTS = """() => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const behind = (e) => {
        const colour = parse(getComputedStyle(e).backgroundColor);
        return colour.length < 4 ? colour : behind(e.parentElement);
    };
    const hasText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    const shown = (e) => e.checkVisibility() && !e.disabled && !e.closest("dialog") && hasText(e);
    return [...document.querySelectorAll("body *")].filter(shown).map((e) => {
        const style = getComputedStyle(e);
        const [a, b] = [light(parse(e.closest("svg") ? style.fill : style.color)), light(behind(e))].sort((x, y) => y - x);
        return [(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 90)];
    });
}"""
"""Of every visible text with what is behind it, as WCAG computes it."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_have_names_and_text_stands_out(open_page: Open, url: str, scheme: str) -> None:
    page = open_page(url, color_scheme=scheme)
    dark = "getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 60"
    assert page.evaluate(dark) == (scheme == "dark")
    ask(page)
    page.click("text=Reliability as a table")
    assert not page.evaluate(NAMES)
    contrasts = page.evaluate(CONTRASTS)
    write(page, "red", 20)
    page.wait_for_selector("#text-result details")
    page.click("text=All tokens as a table")
    assert not page.evaluate(NAMES)
    contrasts += page.evaluate(CONTRASTS)
    assert len(contrasts) > 100 and not [one for one in contrasts if one[0] < 4.5]
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids)) and page.locator("#verdict").get_attribute("role") == "status"
    page.click("#theme")
    assert page.evaluate(dark) == (scheme == "light")
    page.reload()
    assert page.evaluate(dark) == (scheme == "light")


def test_focus_is_seen_and_motion_is_left_out_if_wanted(open_page: Open, url: str) -> None:
    page = open_page(url, reduced_motion="reduce")
    for _ in range(8):
        page.keyboard.press("Tab")
        seen = "[document.activeElement, document.activeElement.nextElementSibling].filter(Boolean)"
        assert page.evaluate(f"{seen}.some(e => getComputedStyle(e).outlineStyle === 'solid')")
    page.evaluate("document.querySelector('#result').setAttribute('aria-busy', 'true')")
    assert page.evaluate("getComputedStyle(document.querySelector('#verdict')).animationName") == "none"


def test_a_phone_is_wide_enough(open_page: Open, url: str) -> None:
    page = open_page(url, viewport={"width": 375, "height": 700})
    fits = "document.documentElement.scrollWidth <= 375"
    assert page.evaluate(fits)
    fill_in(page, "Which?", ["x" * 120, "no", "a choice of many words, as they are at times " * 3])
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".bars")
    page.click("text=Reliability as a table")
    assert page.evaluate(fits)
    write(page, "y" * 200, 20)
    page.wait_for_selector("#text-result details")
    page.click("text=All tokens as a table")
    assert page.evaluate(fits)


def test_screenshots(open_page: Open, url: str, tmp_path: Path) -> None:
    place = Path(os.environ.get("SCREENSHOTS", tmp_path))
    served = os.environ.get("SCREENSHOTS_URL", url)
    for name, scheme, width in (("light", "light", 1280), ("dark", "dark", 1280), ("phone", "light", 375)):
        page = open_page(served, color_scheme=scheme, viewport={"width": width, "height": 900})
        page.click("#example")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector(".bars")
        picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        picture.quantize(256).save(place / f"page-{name}.png", optimize=True)  # a third of the bytes
        assert 10_000 < (place / f"page-{name}.png").stat().st_size < 200_000


# How it is sent -------------------------------------------------------------------------------------------------------


def test_files_are_sent_with_what_a_browser_must_know(url: str) -> None:
    kinds = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".html": "text/html"}
    assert len(FILES) > 9
    for path, file in FILES.items():
        got = httpx.get(f"{url}{path}")
        assert got.content == file.read_bytes() and got.headers["content-type"].startswith(kinds[file.suffix])
        assert got.headers["content-security-policy"].startswith("default-src 'self';")
        assert got.headers["x-content-type-options"] == "nosniff" and got.headers["referrer-policy"] == "no-referrer"
    for path in ("/page/", "/page/../web.py", "/page/%2e%2e/web.py", "/page/nothing.js"):
        assert httpx.get(f"{url}{path}").status_code == 404


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for file in FILES.values():
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", file.read_text(encoding="utf-8"))


# What it says ---------------------------------------------------------------------------------------------------------


def said_by(folder: Path, function: str, arguments: str) -> str:
    """What a function of ``doubt.js`` says."""
    for name in ("doubt.js", "dom.js"):
        shutil.copy(FOLDER / name, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    script = f'import {{ {function} }} from "./doubt.js";\nconsole.log({function}({arguments}));\n'
    (folder / "main.js").write_text(script)
    done = subprocess.run(["node", folder / "main.js"], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip().replace("\u00a0", " ")


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here")
@pytest.mark.parametrize(
    "draws, entropy, epistemic, told",
    [
        (2, 0.69, 0.0, "The draws agree with each other: 100 % of the uncertainty is shared by all of them."),
        (2, 0.69, 0.1, "The draws agree with each other: 86 % of the uncertainty is shared by all of them."),
        (2, 0.69, 0.3, "The draws disagree with each other: 43 % of the uncertainty lies between them."),
        (2, 0.01, 0.0, "The draws are sure, and agree with each other."),
        (1, 0.69, 0.0, "A single set of weights cannot tell its own doubt"),
    ],
)
def test_no_more_is_said_than_follows(tmp_path: Path, draws: int, entropy: float, epistemic: float, told: str) -> None:
    """Draws that agree may all be wrong, as those of a run of one step are."""
    reply = {"draws": [[0.5, 0.5]] * draws, "entropy": entropy, "epistemic": epistemic}
    said = said_by(tmp_path, "explained", f"{json.dumps(reply)}, Math.log(2)")
    assert said.startswith(told)
    assert (" agree with each other" in said) == ("That does not make the answer right" in said)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here")
@pytest.mark.parametrize(
    "confidence, told",
    [
        ({"value": 0.83, "calibrated": True, "abstains": False}, "Confident: right with probability 83 %"),
        ({"value": 0.31, "calibrated": True, "abstains": True}, "Not sure: right with probability 31 %"),
        ({"value": 1e-9, "calibrated": False, "abstains": False, "agreement": 1}, "All draws write the same"),
        ({"value": 0.9, "calibrated": False, "abstains": False, "agreement": 0.75}, "75 % of the draws write the same"),
    ],
)
def test_confidence_in_words(tmp_path: Path, confidence: dict[str, Any], told: str) -> None:
    """A probability of being right is only told if it is calibrated."""
    assert said_by(tmp_path, "trusted", json.dumps(confidence)) == told


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here")
@pytest.mark.parametrize(
    "reply, told",
    [
        ({"distance": None, "unfamiliar": None}, "null"),
        (
            {"distance": 0.42, "unfamiliar": False},
            "Like the training questions: 42 % of the validation questions are nearer",
        ),
        (
            {"distance": 1.0, "unfamiliar": True},
            "Unlike the training questions: 100 % of the validation questions are nearer",
        ),
    ],
)
def test_unfamiliar_questions_in_words(tmp_path: Path, reply: dict[str, Any], told: str) -> None:
    assert said_by(tmp_path, "familiar", json.dumps(reply)).startswith(told)


def test_an_unfamiliar_question_is_told(open_page: Open, url: str, trained: TrainedModel) -> None:
    """The page says what the reply says."""
    page = open_page(url)
    ask(page)
    reply = httpx.post(f"{url}/v1/choices", json=ASKED).json()
    if trained.familiarity is None:
        assert reply["unfamiliar"] is None and page.locator("#familiar").count() == 0
    else:
        said = words(page, "#familiar")
        assert (
            said.startswith("Unlike" if reply["unfamiliar"] else "Like") and f"{100 * reply['distance']:.0f} %" in said
        )


def test_nothing_is_said_of_the_question_or_the_truth() -> None:
    """Neither follows from draws."""
    for file in FILES.values():
        said = file.read_text(encoding="utf-8").lower()
        for claim in ("in the question", "whatever the training data", "agree that it is open", "could remove"):
            assert claim not in said, file.name
