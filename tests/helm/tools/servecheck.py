#!/usr/bin/env python3
"""Check a Serve config (the document of `serve deploy`, RayService.spec.serveConfigV2) with Ray's own schema.

    helm template demo helm -n llm | servecheck.py -
    servecheck.py serve.yaml

The input is a Serve config, or a rendered manifest, out of which each RayService's serveConfigV2 is taken. Beyond
Ray's schema, which ignores keys that it does not know, this names every unknown key (max_ongoing_request, num_gpu,
...) and a route_prefix that does not begin with /. Contents of args, user_config and runtime_env are the
application's own and are not looked at. Ray imports the module of a custom autoscaling policy
(autoscaling_config.policy) while it validates: it must be installed.

Needs Ray with Serve in this Python: pip install 'ray[serve]'. The import takes some 4 seconds.
Exit status: 0 nothing to complain about, 1 complaints, 2 the check could not run.
From Python: servecheck.check(text) returns the complaints about one Serve config as a list.
"""

import argparse
import sys
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

FREE = {
    "args",
    "user_config",
    "runtime_env",
    "resources",
    "fallback_strategy",
    "policy_kwargs",
    "request_router_kwargs",
}


def check(text: str) -> list[str]:
    """Complaints about one Serve config."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"not YAML: {' '.join(str(error).split())}"]
    if not isinstance(document, dict):
        return ["not a YAML mapping"]
    schema = _schema()
    complaints = list(_unknown(schema, document, "$"))
    applications = document.get("applications") or []
    for index, application in enumerate(applications):
        prefix = application.get("route_prefix") if isinstance(application, dict) else None
        if isinstance(prefix, str) and not prefix.startswith("/"):
            complaints.append(f"$.applications[{index}].route_prefix: {prefix!r} does not begin with /")
    if not applications:
        complaints.append("$.applications: no application")
    try:
        schema.model_validate(document)
    except ValidationError as error:
        complaints += [f"{'.'.join(['$', *map(str, one['loc'])])}: {one['msg']}" for one in error.errors()]
    except Exception as error:  # Ray imports the function of a custom autoscaling policy here
        complaints.append(f"$: {type(error).__name__}: {error}")
    return complaints


def configs(text: str) -> list[tuple[str, str]]:
    """(name, Serve config as text) of an input."""
    documents = [document for document in yaml.safe_load_all(text) if document is not None]
    if not any(isinstance(one, dict) and "apiVersion" in one and "kind" in one for one in documents):
        return [("", text)]
    services = [one for one in documents if one.get("kind") == "RayService"]
    return [(f"RayService/{one['metadata']['name']}", one["spec"].get("serveConfigV2") or "") for one in services]


def _schema() -> type[BaseModel]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.serve.schema import ServeDeploySchema  # takes seconds, and may be absent
    return ServeDeploySchema


def _models(annotation: object) -> list[type[BaseModel]]:
    """pydantic models that occur in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]


def _unknown(model: type[BaseModel], value: object, path: str) -> Iterator[str]:
    """Every key of `value` that the pydantic model, or a model nested in it, has no field for."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(model, item, f"{path}[{index}]")
    if not isinstance(value, dict):
        return
    names = {field.alias or name: name for name, field in model.model_fields.items()}
    names |= {name: name for name in model.model_fields}
    for key, part in value.items():
        if key not in names:
            if model.model_config.get("extra") != "forbid":  # else Ray says so itself
                yield f"{path}.{key}: unknown key of {model.__name__} (Ray would ignore it)"
        elif key not in FREE:
            for nested in _models(model.model_fields[names[key]].annotation)[:1]:
                yield from _unknown(nested, part, f"{path}.{key}")


def main() -> int:
    """Entry point; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="Serve config or rendered manifest; - is standard input")
    path = parser.parse_args().file
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
        _schema()
    except OSError as error:
        print(f"servecheck: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"servecheck: {error}; it needs a Python with ray[serve]", file=sys.stderr)
        return 2
    try:
        found = configs(text)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        print(f"servecheck: cannot read {path}: {type(error).__name__}: {' '.join(str(error).split())}")
        return 1
    if not found:
        print(f"servecheck: no RayService in {path}")
        return 1
    complaints = [f"{where}{': ' if where else ''}{said}" for where, part in found for said in check(part)]
    print("\n".join(complaints) or f"{len(found)} Serve config ok")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
