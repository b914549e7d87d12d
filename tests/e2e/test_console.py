"""The console page of a real server with keys, in a real browser: what one sees, types and presses."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from browser import browsing
from console_page import Page
from matplotlib.image import imread
from selenium import webdriver
from selenium.webdriver.common.keys import Keys
from servers import Server, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SEEN_S = 30.0
KEY = "sk-baker-0123456789abcdef"
SLOTS, STEP_MS, N_LONG = 8, 10, 3500
# Two directions, a letter in halves, what would be markup elsewhere, and lines.
ANSWER = ["<b>Bread</b>", " & ", "salt\n", "خبز", " وملح\n", "caf", {"bytes": "c3"}, {"bytes": "a9"}, " хлеб"]
ANSWER_TEXT = "<b>Bread</b> & salt\nخبز وملح\ncafé хлеб"
SCRIPT = {
    "pieces": ["</s>", "loaf ", *ANSWER],
    "eos": 0,
    "replies": [{"when": "all night", "pieces": ["loaf "] * N_LONG}],
    "default": {"pieces": ANSWER},
    "step_ms": STEP_MS,
}
SCREENSHOTS = "BAKEHOUSE_SCREENSHOTS"
MAX_SCREENSHOT_BYTES = 200_000
MIN_COLOURS = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("console")
    (folder / "loaves.json").write_text(json.dumps(SCRIPT))
    keys = folder / "keys.yaml"
    keys.write_text(f"tenants:\n  baker:\n    keys: ['{KEY}']\n")
    keys.chmod(0o600)
    model = {"source": f"scripted:{folder / 'loaves.json'}", "served_name": "loaves"}
    config = {"model": model, "replica": {"max_sequences": SLOTS}, "gateway": {"keys": str(keys)}}
    (folder / "config.yaml").write_text(json.dumps(config))
    with running(folder / "log", "--config", str(folder / "config.yaml")) as ready:
        yield ready


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with browsing(tmp_path_factory.mktemp("profile")) as chrome:
        yield chrome


@pytest.fixture
def page(window: webdriver.Chrome, server: Server) -> Iterator[Page]:
    """Nothing on the console at the end but answers that were errors: no fault of a script or of the policy."""
    shown = Page(window, server.url, KEY, SEEN_S)
    yield shown
    shown.restore()
    said = [entry for entry in window.get_log("browser") if entry["source"] != "network"]  # type: ignore[no-untyped-call]
    assert said == []


def load_of(server: Server) -> dict[str, int]:
    (replica,) = asked(server, "GET", "/v1/replicas").json()["data"]
    load: dict[str, int] = replica["load"]
    return load


def asked(server: Server, method: str, path: str, **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=60, **options)


def chat(question: str, **fields: object) -> dict[str, object]:
    return {"model": "loaves", "messages": [{"role": "user", "content": question}], **fields}


@contextmanager
def busy(server: Server, n_streams: int) -> Iterator[None]:
    """So many answers are on their way."""
    with ExitStack() as streams, httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
        lines = []  # they would close their connections if they were let go
        for i in range(n_streams):
            body = chat(f"{i}: " + "bake all night " * 35, stream=True)  # prompts of many blocks of their own
            stream = streams.enter_context(http.stream("POST", f"{server.url}/v1/chat/completions", json=body))
            lines.append(stream.raise_for_status().iter_lines())
            next(lines[-1])
        yield
    wait_until(lambda: load_of(server)["n_held_blocks"] == 0, SEEN_S, "idle again")


def test_a_question_is_answered_as_the_api_answers_it(page: Page, server: Server) -> None:
    page.open()
    page.ask("What is in it?")
    page.wait_for_end()
    reply = asked(server, "POST", "/v1/chat/completions", json=chat("What is in it?")).json()
    assert page.text(".question") == "What is in it?"
    assert page.text(".answer") == reply["choices"][0]["message"]["content"] == ANSWER_TEXT
    usage = reply["usage"]
    timing = page.text(".timing")
    assert timing.startswith(f"{usage['prompt_tokens']} tokens in, {usage['completion_tokens']} out · first token")
    assert " tok/s · stop · " in timing
    assert page.text("#model") == "loaves"
    # Each line begins at the side where its script begins.
    starts = page.run(
        """
        const text = document.querySelector(".answer").firstChild;
        const range = document.createRange();
        return [..."Bخ"].map((character) => {
          const at = text.data.indexOf(character);
          range.setStart(text, at);
          range.setEnd(text, at + 1);
          const box = document.querySelector(".answer").getBoundingClientRect();
          return (range.getBoundingClientRect().left - box.left) / box.width;
        });
        """
    )
    assert starts[0] < 0.25
    assert starts[1] > 0.75


def test_the_conversation_and_the_settings_go_with_the_next_question(page: Page, server: Server) -> None:
    page.open()
    page.find("summary").click()
    page.fill("#system", "Be brief.")
    page.fill("#max-tokens", "2")
    page.fill("#temperature", "0")
    page.fill("#seed", "7")
    bodies = []
    page.run(
        "window.asked = []; const send = fetch; window.fetch = (path, options) => {"
        " asked.push([path, options.body]); return send(path, options); }"
    )
    for question in ("One?", "Two?"):
        page.fill("#question", question + Keys.ENTER)
        page.wait_for_end()
        said = page.run("return asked")
        bodies.append(json.loads([body for path, body in said if path.endswith("completions")][-1]))
    system, answer = {"role": "system", "content": "Be brief."}, "<b>Bread</b> & "
    assert page.text(".answer") == answer
    assert " · length · " in page.text(".timing")
    assert [body["messages"] for body in bodies] == [
        [system, {"role": "user", "content": "One?"}],
        [
            system,
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "Two?"},
        ],
    ]
    assert [(body["max_tokens"], body["temperature"], body["seed"]) for body in bodies] == [(2, 0, 7)] * 2
    page.find("#clear").click()
    assert page.run("return document.querySelectorAll('.exchange').length") == 0


@pytest.mark.parametrize("way", ["button", "escape", "clear"])
def test_an_answer_that_is_stopped_frees_its_sequence(page: Page, server: Server, way: str) -> None:
    page.open()
    page.ask("Bake all night")
    wait_until(lambda: load_of(server)["n_running"] == 1, SEEN_S, "it runs")
    wait_until(lambda: page.figure("running") == "1", SEEN_S, "the page shows it")
    wait_until(lambda: page.figure("computed")[0] in "123456789", SEEN_S, "a pace")
    assert page.run("return document.querySelectorAll('.slots .held').length") == 1
    assert page.run("return document.querySelectorAll('.blocks .held').length") >= 1
    assert page.figure("open") == "1"
    n_before = len(page.text(".answer"))
    wait_until(lambda: len(page.text(".answer")) > n_before > 0, SEEN_S, "more of it")
    match way:
        case "button":
            page.find("#stop").click()
        case "escape":
            page.find("#question").send_keys(Keys.ESCAPE)
        case "clear":
            page.find("#clear").click()
    wait_until(lambda: load_of(server)["n_running"] == load_of(server)["n_held_blocks"] == 0, SEEN_S, "freed")
    wait_until(lambda: page.figure("running") == page.figure("open") == "0", SEEN_S, "the page shows it")
    assert not page.find("#stop").is_enabled()
    if way == "clear":
        assert page.text(".answer") == ""
    else:
        assert page.text(".answer").startswith("loaf loaf ")
        assert " · stopped · " in page.text(".timing")
        assert 0 < int(page.text(".timing").split(", ")[1].split()[0]) < N_LONG


def test_the_log_follows_a_long_answer_unless_somebody_reads_further_up(page: Page, server: Server) -> None:
    page.open()
    page.resize(360, 500, "light")
    page.ask("Bake all night")
    log = "const log = document.getElementById('log');"
    wait_until(lambda: page.run(f"{log} return log.scrollTop") > 200, SEEN_S, "scrolled")
    assert page.run(f"{log} return log.scrollHeight - log.scrollTop - log.clientHeight") < 40
    page.run(f"{log} log.scrollTop = 0")
    n_before = len(page.text(".answer"))
    wait_until(lambda: len(page.text(".answer")) > n_before + 100, SEEN_S, "more of it")
    assert page.run(f"{log} return log.scrollTop") == 0
    page.find("#question").send_keys(Keys.ESCAPE)
    page.wait_for_end()


def test_the_api_says_in_its_own_words_what_is_wrong(page: Page, server: Server) -> None:
    page.open()
    page.find("summary").click()
    page.fill("#temperature", "-1")
    page.ask("Why?")
    page.wait_for_end()
    refusal = asked(server, "POST", "/v1/chat/completions", json=chat("Why?", temperature=-1))
    assert page.text(".exchange .problem") == f"400: {refusal.json()['error']['message']}"
    assert page.find("#question").get_property("value") == "Why?"
    page.fill("#temperature", "0")
    page.find("#send").click()
    page.wait_for_end()
    assert page.text(".answer") == ANSWER_TEXT


# What is slow to begin has sent its headers before anybody was chosen; and, later, a gateway that has no story.
SLOW_THEN_UNKNOWN = """
    const send = fetch;
    window.fetch = async (path, options) => {
      if (path.endsWith("/explain")) {
        return window.isUnknown ? Response.json({ error: { message: "unknown" } }, { status: 404 })
          : send(path, options);
      }
      const answer = await send(path, options);
      const headers = [...answer.headers].filter(([name]) => name !== "x-bakehouse-route");
      return new Response(answer.body, { headers });
    };
"""


def test_why_tells_what_became_of_a_request_or_that_nobody_knows(page: Page) -> None:
    page.open()
    page.run(SLOW_THEN_UNKNOWN)
    page.ask("What is in it?")
    page.wait_for_end()
    page.find(".why").click()
    wait_until(lambda: page.find(".story").is_displayed(), SEEN_S, "the story")
    told = json.loads(page.text(".story"))
    request_id = page.text(".timing").rpartition(" · request ")[2]
    assert (told["request_id"], told["kind"], len(told["prompts"])) == (request_id, "chat", 1)
    page.find(".why").click()
    assert not page.find(".story").is_displayed()
    page.run("window.isUnknown = true")
    page.find(".why").click()
    wait_until(lambda: page.text(".story") == "unknown", SEEN_S, "in the words of the API")
    assert page.find(".why").is_displayed(), "as another gateway may know"


def test_the_page_asks_for_a_key_and_keeps_it_in_its_tab_alone(page: Page, server: Server) -> None:
    page.open(has_key=False)
    assert page.text("#key-problem") == httpx.get(f"{server.url}/v1/replicas").json()["error"]["message"]
    page.fill("#key", KEY + "\u200b" + Keys.ENTER)  # as it comes with a copied one
    assert page.text("#key-problem") == "a key has printable ASCII characters alone, and no spaces"
    page.fill("#key", "sk-nobody-0123456789abcdef" + Keys.ENTER)
    wait_until(lambda: page.text("#key-problem") == "this API key is not known here", SEEN_S, "refused")
    page.ask("Who am I?")
    page.wait_for_end()
    assert page.text(".exchange .problem") == "401: this API key is not known here"
    page.fill("#key", KEY + Keys.ENTER)
    wait_until(lambda: page.text("#news") == "live", SEEN_S, "live")
    assert not page.find("#key-form").is_displayed()
    page.find("#send").click()
    page.wait_for_end()
    assert page.text(".answer") == ANSWER_TEXT
    kept = page.run(
        "return [location.href, document.cookie, JSON.stringify(localStorage), document.documentElement.outerHTML,"
        " ...performance.getEntriesByType('resource').map((entry) => entry.name)].join(' ')"
    )
    assert KEY not in kept
    page.window.refresh()
    wait_until(lambda: page.text("#news") == "live", SEEN_S, "live after a reload")


# Runs the page's timers by hand and answers its requests with what `answer` makes.
BY_HAND = """
    window.timers = [];
    window.asked = [];
    window.setTimeout = (call, ms) => timers.push({ call, ms });
    window.clearTimeout = (id) => { if (timers[id - 1]) timers[id - 1].call = () => {}; };
    window.fetch = async (path) => { asked.push(path); throw new TypeError("no route"); };
"""
NEXT_POLL = """
    const { call, ms } = timers.at(-1);
    const n = timers.length;
    call();
    for (let turns = 0; timers.length === n && turns < 1000; turns += 1) await null;
    return ms;
"""


def test_polls_slow_down_while_they_fail_and_rest_while_nobody_looks(page: Page, server: Server) -> None:
    by_hand = page.window.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": BY_HAND})
    try:
        page.window.get(server.url)
        wait_until(lambda: bool(page.run("return timers.length")), SEEN_S, "asked once")
        pauses_ms = [page.run(f"return (async () => {{{NEXT_POLL}}})()") for _ in range(6)]
        assert pauses_ms == [2000, 4000, 8000, 16000, 30000, 30000]
        assert page.run("return asked") == ["v1/replicas"] * 7
        assert page.text("#news") == "not live: the gateway cannot be reached: no route"
        hide = "Object.defineProperty(document, 'visibilityState', {value: arguments[0], configurable: true});"
        tell = "document.dispatchEvent(new Event('visibilitychange'));"
        page.run(hide + tell, "hidden")
        page.run(f"return (async () => {{{NEXT_POLL}}})()")
        assert page.run("return asked.length") == 7
        page.run(hide + tell, "visible")
        assert page.run("return asked.length") == 8
    finally:
        page.window.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", by_hand)


def test_nothing_overlaps_or_needs_sideways_scrolling_in_narrow_and_wide_windows(
    page: Page, server: Server, tmp_path: Path
) -> None:
    """Under load. `BAKEHOUSE_SCREENSHOTS` names the folder in which the picture is kept."""
    picture = Path(os.environ.get(SCREENSHOTS, tmp_path)) / "console.png"
    backgrounds = set()
    with busy(server, 5):
        page.open()
        page.find("#key-toggle").click()
        page.find("summary").click()
        for question in ("What is in it?", "x" * 300):
            page.ask(question)
            page.wait_for_end()
        wait_until(lambda: page.figure("running") == "5", SEEN_S, "under load")
        for width, scheme in ((360, "light"), (768, "dark"), (1440, "light")):
            page.resize(width, 1000, scheme)
            found = page.layout()
            assert (found["overlaps"], found["wide"]) == ([], []), width
            assert found["right"] <= found["inside"] <= width
            assert found["n"] > 40
            backgrounds.add(page.run("return getComputedStyle(document.body).backgroundColor"))
        page.resize(1280, 720, "light")
        for opened in ("#key-toggle", "summary", "#clear"):
            page.find(opened).click()
        page.ask("What is in it?")
        page.wait_for_end()
        assert page.window.save_screenshot(str(picture))
    assert len(backgrounds) == 2
    assert picture.stat().st_size < MAX_SCREENSHOT_BYTES
    assert len(np.unique(imread(picture).reshape(-1, 4)[:, :3], axis=0)) > MIN_COLOURS


def test_everything_is_named_and_reached_by_the_keyboard(page: Page, server: Server) -> None:
    page.open()
    page.run("document.activeElement.blur()")
    reached = []
    for _ in range(12):
        webdriver.ActionChains(page.window).send_keys(Keys.TAB).perform()
        reached.append(page.run("return document.activeElement.id || document.activeElement.className"))
    assert reached[:7] == ["skip", "key-toggle", "log", "question", "send", "clear", ""]
    tree = page.window.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = ("button", "textbox", "image", "log", "link", "list", "region")
    names = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"] and node["role"]["value"] in roles
    ]
    assert {role for role, _ in names} == set(roles)
    assert [role for role, name in names if not name and role != "list"] == []
    (blocks,) = [name for role, name in names if role == "image" and name.endswith(" blocks")]
    (replica,) = asked(server, "GET", "/v1/replicas").json()["data"]
    assert blocks.endswith(f" of {replica['n_blocks']:,} blocks")
