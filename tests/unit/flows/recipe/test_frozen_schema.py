"""The JSON schema that `lifecycle schema` prints may not change, except for descriptions and titles.

After a field was added, `python -m tests.unit.flows.recipe.test_frozen_schema` writes `frozen_schema.json` again. Where
its diff changes or removes a definition or a property, recipes that people have are refused.
"""

import hashlib
import json
from pathlib import Path

from flows.recipe.recipe import json_schema

FROZEN = Path(__file__).with_name("frozen_schema.json")


def without_texts(tree):
    """Return a JSON schema without its explanatory texts, but with properties called `description` or `title`."""
    if isinstance(tree, dict):
        texts = {key for key in ("description", "title") if isinstance(tree.get(key), str)}
        return {key: without_texts(value) for key, value in tree.items() if key not in texts}
    return [without_texts(item) for item in tree] if isinstance(tree, list) else tree


def digest(tree):
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]


def digests():
    """Return the digest of each property in the recipe schema, and of the rest of each definition, by name."""
    schema = without_texts(json_schema())
    definitions = {**schema.pop("$defs"), "RecipeFile": schema}
    found = {}
    for name, definition in sorted(definitions.items()):
        properties = definition.pop("properties", {})
        found[name] = digest(definition)
        found |= {f"{name}.{field}": digest(said) for field, said in properties.items()}
    return found


def test_the_schema_of_recipes_is_the_frozen_one_but_for_its_texts():
    now, frozen = digests(), json.loads(FROZEN.read_text())
    changed = {name for name in now.keys() | frozen.keys() if now.get(name) != frozen.get(name)}
    assert sorted(changed) == [], "these differ from the frozen schema"


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(digests(), indent=0) + "\n")
