"""SIGTERM under load, as an orchestrator sends it: what runs is finished, what comes is refused."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from servers import STOP_TIMEOUT_S, gone, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

N_TOKENS = 160
SCRIPT = {
    "pieces": ["</s>", "bread"],
    "eos": 0,
    "default": {"pieces": ["bread"] * N_TOKENS},
    "step_ms": 50,
}
BODY = {"model": "scripted", "prompt": "hi", "temperature": 0}


def post(url: str) -> httpx.Response:
    """A new request, of one token."""
    return httpx.post(f"{url}/v1/completions", json=BODY | {"max_tokens": 1}, timeout=30)


def test_c50_three_streams_end_in_order_a_new_request_is_refused_and_the_exit_status_is_0(tmp_path: Path) -> None:
    script = tmp_path / "bread.json"
    script.write_text(json.dumps(SCRIPT))
    with (
        running(tmp_path / "log", f"scripted:{script}", "--served-model-name", "scripted") as server,
        ThreadPoolExecutor() as pool,
    ):
        processes = server.tree()
        begun: list[str] = []

        def read_stream() -> list[str]:
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=BODY | {"stream": True}, timeout=60
            ) as answer:
                lines = []
                for line in filter(None, answer.iter_lines()):
                    lines.append(line.removeprefix("data: "))
                    if len(lines) == 1:
                        begun.append(line)
                return lines

        streams = [pool.submit(read_stream) for _ in range(3)]
        wait_until(lambda: len(begun) == 3, 30, "three streams running")
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.log.read_text(), 30, "draining")
        refused = [post(server.url)]
        while refused[-1].status_code == 200 and len(refused) < 20:  # Ray tells the gateway within some 100 ms
            refused.append(post(server.url))
        assert refused[-1].status_code == 503, refused[-1].text
        assert refused[-1].json()["error"]["code"] == "unavailable"
        assert int(refused[-1].headers["retry-after"]) >= 1
        for stream in streams:
            lines = stream.result(timeout=60)
            texts = [choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
            assert ("".join(texts), lines[-1]) == ("bread" * N_TOKENS, "[DONE]")
        assert server.process.wait(STOP_TIMEOUT_S) == 0
        assert gone(processes)
        assert "Traceback" not in server.log.read_text()
