"""Makes ``tests/pytorchjob.schema.json`` from the models of Kubeflow's own SDK.

    python -m venv x; x/bin/pip install kubeflow-training
    x/bin/python tests/pytorchjob_schema.py examples/cluster/pytorchjob.yaml

The schema has only the models that the file uses, and allows no other fields. Run it in
a separate environment, because the SDK needs a dozen packages.
"""

import functools
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

OUT = Path(__file__).parent / "pytorchjob.schema.json"
PLAIN = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "bool": {"type": "boolean"},
    "object": {},
    "datetime": {"type": "string"},
}


def model_of(name: str) -> Any:
    """Return the class of a model: from the SDK if it has one, else from Kubernetes."""
    import kubeflow.training.models as ours
    import kubernetes.client.models as theirs

    return getattr(ours, name, None) or getattr(theirs, name)


def schema_of(kind: str, found: object) -> dict[str, Any]:
    """Return the schema of a field of type ``kind``, with the keys in ``found``."""
    if kind in PLAIN:
        return PLAIN[kind]
    if inner := re.fullmatch(r"list\[(.+)\]", kind):
        parts = found if isinstance(found, list) else []
        return {"type": "array", "items": merged(inner[1], parts)}
    if inner := re.fullmatch(r"dict\(str, (.+)\)", kind):
        parts = list(found.values()) if isinstance(found, dict) else []
        values = merged(inner[1], parts)
        return {"type": "object", "additionalProperties": values}
    return object_of(kind, found)


def merged(kind: str, parts: list[Any]) -> dict[str, Any]:
    """Return one schema for several values of one type, with the keys of all."""
    schemas = [schema_of(kind, part) for part in parts] or [schema_of(kind, None)]
    return functools.reduce(joined, schemas)


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two schemas; a field with a type in either has that type."""
    result = dict(one)
    for key, value in other.items():
        before = one.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            value = joined(before, value)
        result[key] = value
    return result


def object_of(kind: str, found: object) -> dict[str, Any]:
    """Return a schema with all fields of a model, and types of those in ``found``."""
    model = model_of(kind)
    used = found if isinstance(found, dict) else {}
    fields = {}
    for name, key in model.attribute_map.items():
        if key in used:
            fields[key] = schema_of(model.openapi_types[name], used[key])
        else:
            fields[key] = {}
    return {"type": "object", "properties": fields, "additionalProperties": False}


def main(file: str) -> None:
    """Write the schema of the models and fields in ``file``."""
    job = yaml.safe_load(Path(file).read_text())
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"Made by {Path(__file__).name} from the models of "
        f"kubeflow-training {version('kubeflow-training')} and "
        f"kubernetes {version('kubernetes')}",
        **object_of("KubeflowOrgV1PyTorchJob", job),
        "required": ["apiVersion", "kind", "metadata", "spec"],
    }
    OUT.write_text(json.dumps(schema, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
