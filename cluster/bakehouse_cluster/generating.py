"""`bakehouse generate`: loads the model, runs the batch, shows how far it is."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.source import open_source
from rich.console import Console

from bakehouse_cluster.batch import Key, Line, answer_all, answered_keys, count_lines, read_lines
from bakehouse_cluster.capturing import captures_told
from bakehouse_cluster.compiling import compiling_told
from bakehouse_cluster.config import Config
from bakehouse_cluster.offline import IN_FLIGHT_PER_SEQUENCE, OfflineModel
from bakehouse_cluster.progress import Stages, counted, n_of


def generate(config: Config, input_path: Path, output_path: Path, console: Console) -> None:
    """Answer every line of the input that the output does not hold yet.

    Raises `StartupError` where the files or the model cannot be used, `Unavailable` where the engine fails.
    """
    if output_path.exists() and output_path.samefile(input_path):
        raise StartupError(f"--output is the same file as --input, {input_path}; answers need a file of their own")
    n_lines = count_lines(input_path)
    done = answered_keys(output_path)
    n_open = sum(1 for _ in _open_lines(input_path, done))
    if not n_open:
        said = f"all {n_of(n_lines, 'answer')}" if n_lines != 1 else "the 1 answer"
        console.print(f"{output_path} holds {said} already", highlight=False, soft_wrap=True)
        return
    stages = Stages(console)
    try:
        with _appended(output_path) as output, compiling_told(stages.note):
            with (
                stages.stage(f"model {config.model.source}"),
                captures_told(stages.note, open_source(config.source).cache_dir),
            ):
                model = OfflineModel(config)
            with counted(console, "answers", n_total=n_lines, n_done=n_lines - n_open) as advance:
                n_errors = asyncio.run(_answer(model, _open_lines(input_path, done), output, advance))
    except OSError as error:
        raise StartupError(f"{output_path}: {error.strerror}") from error
    console.print(
        f"{n_of(n_open, 'line')} answered in {output_path}, {n_errors} of them by an error",
        highlight=False,
        soft_wrap=True,
    )


@contextmanager
def _appended(path: Path) -> Iterator[TextIO]:
    """The file at `path`, to be added to; one that this makes is taken away again where nothing came of it."""
    is_new = not path.exists()
    try:
        with path.open("a", encoding="utf-8") as file:
            yield file
    finally:
        if is_new and path.exists() and not path.stat().st_size:
            path.unlink()


async def _answer(model: OfflineModel, lines: Iterator[Line], output: TextIO, advance: Callable[[], None]) -> int:
    n_in_flight = IN_FLIGHT_PER_SEQUENCE * model.card.max_sequences
    try:
        return await answer_all(model.gateway, lines, output, n_in_flight=n_in_flight, on_answer=advance)
    finally:
        await model.engine.close()


def _open_lines(path: Path, done: set[Key]) -> Iterator[Line]:
    return (line for line in read_lines(path) if line.key not in done)
