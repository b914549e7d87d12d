"""The console page's files, as they are written and as they are served."""

import re
from collections.abc import AsyncGenerator
from pathlib import Path

import bakehouse_router.console
import httpx
import pytest
import pytest_asyncio
from bakehouse_router.api.http import build_api
from bakehouse_router.console.pages import CONSOLE_PATHS
from bakehouse_router.gateway import Gateway
from bakehouse_router.keys import KeyRing
from bakehouse_router.text.model_text import ModelText
from gateways import ScriptedDispatcher, served, settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

STATIC = Path(bakehouse_router.console.__file__).parent / "static"
REPLICAS = "/v1/replicas"
KEY = "sk-alice-0123456789abcdef"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# What one file of the page names of another.
REFERENCE = re.compile(r'(?:src|href|from)(?:=| )"(?!#)([^"]+)"')
ELSEWHERE = re.compile(r"\w+://[^\"]*|[\"'(]//|url\(")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(text: ModelText) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with (
        served(text, ScriptedDispatcher(["Hi"])) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield http


def _file_of(path: str) -> Path:
    return STATIC / ("index.html" if path == "/" else path.removeprefix("/console/"))


async def test_every_file_of_the_page_has_a_path() -> None:
    assert {_file_of(path) for path in CONSOLE_PATHS} == set(STATIC.iterdir())


@pytest.mark.parametrize("path", sorted(CONSOLE_PATHS))
async def test_a_file_comes_whole_with_its_type_and_under_a_strict_policy(
    client: httpx.AsyncClient, path: str
) -> None:
    file = _file_of(path)
    answers = [await client.get(path), await client.head(path)]
    assert [answer.content for answer in answers] == [file.read_bytes(), b""]
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == MEDIA_TYPES[file.suffix]
        assert answer.headers["content-length"] == str(file.stat().st_size)
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert {policy[kind] for kind in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"


@pytest.mark.parametrize("path", ["/", "/console/main.js"])
async def test_what_a_browser_has_already_is_not_sent_again(client: httpx.AsyncClient, path: str) -> None:
    first = await client.get(path)
    etag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known in (etag, f"W/{etag}", f'"other", {etag}'):
        again = await client.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert (await client.get(path, headers={"if-none-match": '"other"'})).content == first.content


async def test_files_differ_in_their_tags(client: httpx.AsyncClient) -> None:
    tags = {(await client.get(path)).headers["etag"] for path in CONSOLE_PATHS}
    assert len(tags) == len(CONSOLE_PATHS)


async def test_the_page_takes_nothing_from_elsewhere_and_all_that_it_names_is_there() -> None:
    named = set()
    for path in CONSOLE_PATHS:
        text = _file_of(path).read_text()
        assert ELSEWHERE.findall(text) in ([], ["http://www.w3.org/2000/svg"]), path  # an id, not an address
        named |= {"/" + reference for reference in REFERENCE.findall(text) if path == "/"}
        named |= {"/console/" + reference[2:] for reference in REFERENCE.findall(text) if path.endswith(".js")}
    assert named == CONSOLE_PATHS - {"/"}


def _luminance(colour: str) -> float:
    """Relative, as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


async def test_text_can_be_read_in_light_and_in_dark() -> None:
    light, dark = re.findall(r":root \{(.*?)\}", (STATIC / "console.css").read_text(), re.DOTALL)
    for theme in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): #(\w{6});", theme))
        pairs = [(text, behind) for text in ("ink", "faint", "bad") for behind in ("paper", "sheet")]
        for text, behind in [*pairs, ("on-crust", "crust")]:
            dim, bright = sorted(_luminance(colours[name]) for name in (text, behind))
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (text, behind)


@pytest.mark.parametrize("path", ["/console", "/console/", "/console/index.html", "/console/../x", "/index.html"])
async def test_other_paths_beside_the_page_have_the_envelope_of_the_api(
    client: httpx.AsyncClient, path: str
) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_the_page_takes_no_other_methods(client: httpx.AsyncClient) -> None:
    answer = await client.post("/")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_c29_the_page_is_open_and_its_numbers_ask_for_a_key(text: ModelText, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"tenants:\n  alice:\n    keys: ['{KEY}']\n")
    app = build_api(Gateway(settings(), ScriptedDispatcher(), text), keys=KeyRing(path))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        assert {(await client.get(path)).status_code for path in CONSOLE_PATHS} == {200}
        refusal = await client.get(REPLICAS)
        answer = await client.get(REPLICAS, headers={"authorization": f"Bearer {KEY}"})
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
