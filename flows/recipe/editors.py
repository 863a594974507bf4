"""JSON schema of recipes in draft-07, which editors take: YAML's language server, and others that know no later draft.

Pydantic writes 2020-12 (`recipe.json_schema`), in which definitions, tuples and what stands beside a `$ref` are said
otherwise; draft-07 ignores what stands beside a `$ref`, so that completions would lose descriptions and defaults.
"""

from typing import Any

from flows.recipe.recipe import json_schema

DRAFT = "http://json-schema.org/draft-07/schema#"
IDENTITY = "urn:llm-lifecycle:recipe"
BELOW = ("additionalProperties", "items", "not")
"""Keywords that hold a schema; `additionalProperties` may also hold a boolean."""
BELOW_BY_NAME = ("definitions", "patternProperties", "properties")
ALTERNATIVES = ("anyOf", "oneOf", "allOf")


def editor_schema() -> dict[str, Any]:
    """Return the JSON schema of recipe files in draft-07, with an `$id`."""
    schema = json_schema()
    return {
        **_in_draft_07({**schema, "definitions": schema["$defs"]}),
        "$schema": DRAFT,
        "$id": IDENTITY,
    }


def _in_draft_07(schema: Any) -> Any:
    """Return one schema of 2020-12 as draft-07 says it; values such as defaults stay as they are."""
    if not isinstance(schema, dict):
        return schema
    converted = {name: value for name, value in schema.items() if name not in ("$ref", "$defs", "discriminator")}
    for name in converted.keys() & {*BELOW}:
        converted[name] = _in_draft_07(converted[name])
    for name in converted.keys() & {*BELOW_BY_NAME}:
        converted[name] = {key: _in_draft_07(below) for key, below in converted[name].items()}
    for name in converted.keys() & {*ALTERNATIVES}:
        converted[name] = [_in_draft_07(below) for below in converted[name]]
    if "prefixItems" in converted:
        converted["additionalItems"] = converted.pop("items", True)
        converted["items"] = [_in_draft_07(below) for below in converted.pop("prefixItems")]
    if reference := schema.get("$ref"):
        reference = {"$ref": reference.replace("#/$defs/", "#/definitions/")}
        converted = {**converted, "allOf": [reference]} if converted else reference
    return converted
