"""Values that the chart refuses, each with what its one error says: `tests/helm/refused.yaml`."""

from dataclasses import dataclass

import yaml
from charts import ROOT


@dataclass(frozen=True, slots=True)
class Refused:
    """`sets` (`path=value`) on top of an example, and the error."""

    example: str
    sets: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{self.example}: {' '.join(self.sets)}"


def _read(part: str) -> list[Refused]:
    table = yaml.safe_load((ROOT / "tests" / "helm" / "refused.yaml").read_text())[part]
    return [
        Refused(example, tuple(sets.split("  ")), message)
        for example, refusals in table.items()
        for sets, message in refusals.items()
    ]


CONTRADICTIONS = _read("contradictions")
WRONG_VALUES = _read("wrong_values")
