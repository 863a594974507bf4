"""Reward by JSON Schema: 1 where the completion is JSON that conforms to the schema, else 0."""

from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator

from stages.core.program import Program
from stages.rewards.reward import AskingReward, Completion

LIMIT_S = 2.0
"""Seconds of CPU time for checking one completion against a JSON Schema."""
GRACE_S = 2.0
"""Seconds beyond the CPU time limit (`LIMIT_S`) after which the process that checks a completion is killed."""


class JsonSchemaReward(AskingReward):
    """Reward of 1 where the completion is JSON that conforms to the schema, and nothing else, else 0."""

    type: Literal["json_schema"]
    json_schema: dict[str, JsonValue] = Field(
        description="JSON Schema that completions must conform to, without references to other files."
    )

    @field_validator("json_schema")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for

        try:
            validator_for(schema).check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"is no JSON Schema: {error.message}") from error
        if outside := [text for text in _references(schema) if not text.startswith("#")]:
            raise ValueError(f"refers to {outside[0]!r}; expected references within it (`#/…`) alone")
        return schema

    @property
    def limit_s(self) -> float:
        return LIMIT_S

    def program(self) -> Program:
        return Program("stages.rewards.json_schema_program", str(LIMIT_S))

    def asked(self, program: Program, completion: Completion) -> float:
        question = {"schema": self.json_schema, "text": completion.text}
        return float(program.ask_hostile(question, LIMIT_S + GRACE_S))


def _references(schema: object) -> list[str]:
    if isinstance(schema, dict):
        own = [value for key, value in schema.items() if key in ("$ref", "$dynamicRef") and isinstance(value, str)]
        return [*own, *(text for value in schema.values() for text in _references(value))]
    return [text for item in schema for text in _references(item)] if isinstance(schema, list) else []
