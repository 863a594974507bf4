"""1 where the completion is JSON that a schema describes, else 0."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator

from stages.rewards.reward import Completion, CompletionReward


class JsonSchemaReward(CompletionReward):
    """1 where the completion is JSON that the schema describes, and nothing else, else 0."""

    type: Literal["json_schema"]
    json_schema: dict[str, JsonValue] = Field(description="JSON Schema, without references to other files.")

    @field_validator("json_schema")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        from jsonschema import SchemaError

        try:
            _validator(schema).check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"is no JSON Schema: {error.message}") from error
        if outside := [text for text in _references(schema) if not text.startswith("#")]:
            raise ValueError(f"refers to {outside[0]!r}; expected references within it (`#/…`) alone")
        return schema

    def score(self, completion: Completion) -> float:
        try:
            found = json.loads(completion.text)
        except (ValueError, RecursionError):
            return 0.0
        return float(_validator(self.json_schema)(self.json_schema).is_valid(found))


def _validator(schema: dict[str, Any]) -> Any:
    from jsonschema.validators import validator_for

    return validator_for(schema)


def _references(schema: object) -> list[str]:
    if isinstance(schema, dict):
        own = [value for key, value in schema.items() if key in ("$ref", "$dynamicRef") and isinstance(value, str)]
        return [*own, *(text for value in schema.values() for text in _references(value))]
    return [text for item in schema for text in _references(item)] if isinstance(schema, list) else []
