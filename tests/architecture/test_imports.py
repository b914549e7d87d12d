"""What may be loaded by what, seen at run time: the import contracts do not see lazy or transitive imports."""

import importlib
import subprocess
import sys
from pathlib import Path

import bakehouse
import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("cluster", "replica", "kernels", "router")


def loaded_by(statement: str) -> set[str]:
    """The top-level modules in a fresh interpreter after `statement`."""
    script = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


def test_the_facade_alone_loads_nothing_of_ours_and_neither_torch_nor_ray() -> None:
    loaded = loaded_by("import bakehouse")
    assert not {name for name in loaded if name.startswith("bakehouse_")}
    assert not loaded & {"torch", "ray", "numpy"}


@pytest.mark.parametrize(
    "module",
    ["bakehouse_replica.core.scheduler", "bakehouse_replica.core.hashing", "bakehouse_router.policy.pick"],
)
def test_pure_code_loads_neither_tensors_nor_ray_nor_an_event_loop(module: str) -> None:
    heavy = {"torch", "triton", "numba", "numpy", "ray", "transformers", "asyncio", "fastapi", "pydantic"}
    assert not loaded_by(f"import {module}") & heavy


def test_the_command_line_loads_neither_torch_nor_ray_nor_transformers() -> None:
    assert not loaded_by("import bakehouse_cluster.cli") & {"torch", "ray", "transformers", "numba"}


def test_every_public_name_resolves_and_says_where_it_lives() -> None:
    assert set(bakehouse.__all__) == set(bakehouse._HOME)
    for name, home in bakehouse._HOME.items():
        assert getattr(bakehouse, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Loaf'"):
        getattr(bakehouse, "Loaf")  # noqa: B009 - the type checkers would refuse the attribute


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_a_source_root_is_not_itself_a_package(root: str) -> None:
    """A `kernels/__init__.py` would shadow other packages of that name on the path."""
    assert not (ROOT / root / "__init__.py").exists()


def test_deploying_the_application_loads_neither_torch_nor_transformers() -> None:
    """The command line deploys it, and would load for seconds what only gateways and replicas need."""
    assert not loaded_by("import bakehouse_cluster.app") & {"torch", "transformers", "numba"}
