"""What would take a core, or the whole process, ends in a process of its own."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import psutil
from bakehouse_router.grammar_sandbox import Bounds, GrammarSandbox
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.structured import MOST
from grammars import regex, schema, small_vocabulary
from scripted import until
from servers import wait_until

ENDLESS = schema(
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
import asyncio
import sys
sys.path[:] = {[*sys.path, str(Path(__file__).parent)]!r}
from bakehouse_router.grammar_sandbox import GrammarSandbox
from bakehouse_router.structured import MOST
from grammars import regex, small_vocabulary
from test_grammar_sandbox import ENDLESS
async def main():
    sandbox = GrammarSandbox(small_vocabulary())
    await sandbox.find_fault(regex("ok"), MOST)
    trial = asyncio.create_task(sandbox.find_fault(ENDLESS, MOST))
    await asyncio.sleep(0)
    print((await sandbox._server())._process.pid, flush=True)
    await trial
asyncio.run(main())
"""


async def test_c26_what_compiles_without_end_ends_with_its_time_on_a_processor() -> None:
    sandbox = GrammarSandbox(small_vocabulary())
    assert await sandbox.find_fault(ENDLESS, Bounds(compute_s=0.1, n_bytes=MOST.n_bytes)) is None
    assert await sandbox.find_fault(regex("ok"), MOST) == ""


async def test_c26_what_overflows_a_stack_or_takes_too_much_memory_ends_alone() -> None:
    sandbox = GrammarSandbox(small_vocabulary())
    *broken, wrong = await asyncio.gather(
        sandbox.find_fault(REFERENCES, MOST),
        sandbox.find_fault(ENDLESS, Bounds(compute_s=600.0, n_bytes=16 * 1024**2)),  # within about 1 s
        sandbox.find_fault(regex("ok"), MOST),
        sandbox.find_fault(regex("(a"), MOST),
    )
    assert broken == [None, None, ""]
    assert "regex parse error" in str(wrong)


async def test_a_grammar_ends_when_nobody_waits_for_it_any_more() -> None:
    sandbox = GrammarSandbox(small_vocabulary())
    await sandbox.start()
    server = psutil.Process((await sandbox._server())._process.pid)
    trial = asyncio.create_task(sandbox.find_fault(ENDLESS, Bounds(compute_s=60.0, n_bytes=MOST.n_bytes)))
    await until(lambda: bool(server.children()))
    trial.cancel()
    await until(lambda: not server.children())


async def test_a_server_that_has_died_idle_is_replaced() -> None:
    sandbox = GrammarSandbox(small_vocabulary())
    await sandbox.start()
    process = (await sandbox._server())._process
    process.kill()
    process.wait()
    assert await sandbox.find_fault(regex("ok"), MOST) == ""


async def test_the_first_grammars_share_one_server() -> None:
    sandbox = GrammarSandbox(small_vocabulary())
    others = len(psutil.Process().children())
    faults = await asyncio.gather(*(sandbox.find_fault(regex(f"a{{{n}}}"), MOST) for n in range(1, 9)))
    assert faults == [""] * 8
    assert len(psutil.Process().children()) == others + 1


def test_all_processes_end_with_a_gateway_that_is_killed_in_the_middle_of_a_grammar() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        server = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: bool(server.children()), 20.0, "the grammar is being tried")
        processes = [server, *server.children()]
        parent.kill()
        parent.wait()

    def have_ended() -> bool:
        return all(not one.is_running() or one.status() == psutil.STATUS_ZOMBIE for one in processes)

    wait_until(have_ended, 20.0, "the sandbox's processes have ended")


async def test_a_schema_of_the_greatest_depth_fits_the_sandbox() -> None:
    depth = GatewaySettings().max_schema_depth
    nested: dict[str, object] = {"type": "integer"}
    for _ in range((depth - 1) // 2):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    assert await GrammarSandbox(small_vocabulary()).find_fault(schema(json.dumps(nested)), MOST) == ""
