"""What would take a core, or the whole process, ends in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import psutil
import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import Grammar
from bakehouse_router.grammar_sandbox import MAX_COMPILE_S, GrammarSandbox, TooCostly
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.structured import GrammarChecker
from grammars import regex, schema, small_vocabulary
from servers import wait_until

PATTERNS = schema(
    json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{n_chars}}}b"} for n_chars in range(5, 60)]})
)
REFERENCES = schema(
    json.dumps(
        {
            "$ref": "#/$defs/a0",
            "$defs": {
                f"a{index}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{(index + 1) % 700}"}}}
                for index in range(700)
            },
        }
    )
)


_PARENT = f"""
import sys
sys.path[:] = {[*sys.path, str(Path(__file__).parent)]!r}
from threading import Thread
from bakehouse_router.grammar_sandbox import GrammarSandbox
from grammars import regex, small_vocabulary
from test_grammar_sandbox import PATTERNS
sandbox = GrammarSandbox(small_vocabulary())
sandbox.find_fault(regex("ok"))
sandbox._child._pipe.send(PATTERNS)
print(sandbox._child._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("grammar", [PATTERNS, REFERENCES], ids=["endless", "overflowing a stack"])
def test_c26_what_kills_the_sandbox_is_refused_and_the_next_grammar_is_tried(grammar: Grammar) -> None:
    sandbox = GrammarSandbox(small_vocabulary())
    assert sandbox.find_fault(regex("ok")) == ""
    begun_at = perf_counter()
    with pytest.raises(TooCostly, match=r"more than 1\.5 s"):
        sandbox.find_fault(grammar)
    assert perf_counter() - begun_at < MAX_COMPILE_S + 2.0  # ending the process takes a moment on a busy machine
    assert sandbox.find_fault(regex("ok")) == ""
    assert "regex parse error" in sandbox.find_fault(regex("(a"))


def test_a_process_that_has_died_idle_is_replaced() -> None:
    sandbox = GrammarSandbox(small_vocabulary())
    assert sandbox.find_fault(regex("ok")) == ""
    child = sandbox._child
    assert child is not None
    child._process.kill()
    child._process.wait()
    assert sandbox.find_fault(regex("ok")) == ""


def test_the_process_ends_with_a_parent_that_is_killed_in_the_middle_of_a_grammar() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()

    def has_ended() -> bool:
        return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    wait_until(has_ended, 20.0, "the sandbox's process has ended")


async def test_c26_the_gateway_refuses_it_naming_the_field_and_goes_on() -> None:
    checker = GrammarChecker(small_vocabulary(), GatewaySettings())
    with pytest.raises(InvalidRequest, match=r"response_format: the grammar takes") as refused:
        await checker.check(REFERENCES, "response_format")
    assert refused.value.param == "response_format"
    await checker.check(regex("ok"))


def test_a_schema_of_the_greatest_depth_fits_the_sandbox() -> None:
    depth = GatewaySettings().max_schema_depth
    nested: dict[str, object] = {"type": "integer"}
    for _ in range((depth - 1) // 2):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    assert GrammarSandbox(small_vocabulary()).find_fault(schema(json.dumps(nested))) == ""
