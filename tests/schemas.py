"""Validators of the published schemas. jsonschema is a tool of the tests; the product only carries the schemas."""

from __future__ import annotations

from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from capture.schemas import load, names


@cache
def validator(name: str) -> Draft202012Validator:
    """A validator that knows all published schemas."""
    resources = [(schema["$id"], Resource.from_contents(schema)) for schema in map(load, names())]
    registry: Registry[Any] = Registry().with_resources(resources)
    return Draft202012Validator(load(name), registry=registry)
