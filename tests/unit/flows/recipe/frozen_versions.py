"""Generator of stage configs; a JSON file freezes the artifact version and resume key of each.

`python -m tests.unit.flows.recipe.frozen_versions` writes the file. Its diff may have new lines. A changed line means
that every lifecycle home builds such an artifact again: raise a `STAGE_VERSION` for that, or mark the new field
`AddedLater`.
"""

import functools
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from pydantic import ValidationError

from flows.recipe.version import identity_of, resume_key_of, version_of
from stages.core.contract import StageConfig
from stages.kinds.registry import KINDS
from tests.unit.flows.recipe.test_version import EXAMPLES, UPSTREAM, inside, paths, variants

FROZEN = Path(__file__).with_name("frozen_versions.json")
OUTSIDE = {"task_folder": "f" * 64, "revision": "recorded"}
VALUES_PER_FIELD = 2
"""Number of values tried for each field that accepts any text or number; fields with listed choices try all."""
ANY_TEXT = ('"x"', '"https://x/v1"', '"hf://org/name"')
"""JSON values to try in fields that accept free text."""
LAYOUTS = (
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2, "accumulate": "sharded"},
    {"dp_shard": 2, "tp": 4, "sequence_parallel": True},
    {"cp": 2, "dp_shard": 2, "recompute": "full"},
    {"pp": 4, "vpp": 2, "micro_batch_size": 2},
    {"ep": 4, "etp": 2, "tp": 2, "dp_shard": 4},
)
ADAPTERS = (
    {"rank": 4},
    {"use_dora": True},
    {"init": "pissa"},
    {"base_precision": "nf4"},
    {"stack": "merge", "modules_to_save": ["lm_head"]},
    {"target_parameters": ["mlp.experts.gate_up_proj"]},
)
BASES = {
    "train": [
        *({**example, "engine": engine} for example in EXAMPLES["train"] for engine in ("fsdp", "megatron")),
        *(
            {**EXAMPLES["train"][number], "engine": engine, "layout": layout}
            for number, engine, layout in product((0, 1), ("fsdp", "megatron"), LAYOUTS)
        ),
        *(
            {**EXAMPLES["train"][number], "engine": engine, "adapter": adapter}
            for number, engine, adapter in product((0, 1), ("fsdp", "megatron"), ADAPTERS)
        ),
        {**EXAMPLES["train"][1], "dpo": {"loss_type": "exo_pair", "label_smoothing": 0.1}},
        {**EXAMPLES["train"][1], "method": "cpo", "cpo": {"loss_type": "alphapo"}},
        {**EXAMPLES["train"][0], "data": {"dataset": "problems", "format": "text", "packing": "cut"}},
    ],
    "curate": [{**EXAMPLES["curate"][0], "redact": ["email", "phone", "ip_address", "credit_card", "iban"]}],
    "quantize": [
        {"kind": "quantize", "model": "base", "method": method, **weights, "calibration": {"dataset": "problems"}}
        for method in ("awq", "gptq", "int8", "fp8", "gguf")
        for weights in ({}, {"gguf_type": "q4_k_m"}, {"gguf_type": "q8_0"})
    ],
}


def config_of(kind: str, base: dict, path: str, value: object) -> StageConfig:
    """Return a stage config whose field at `path` is set to `value`; an empty path leaves the config unchanged."""
    config = KINDS[kind].model_validate(base)
    if not path:
        return config
    tree = config.model_dump(mode="json")
    *parents, field = path.split("/")
    functools.reduce(inside, parents, tree)[field] = value
    return KINDS[kind].model_validate(tree)


def digests_of(config: StageConfig) -> list[str]:
    """Return a config's artifact version, and the key by which a retry finds the config's unfinished work."""
    return [version_of(identity_of(config, UPSTREAM, OUTSIDE)), resume_key_of(config, UPSTREAM, OUTSIDE)]


def valid_bases(kind: str) -> Iterator[dict]:
    """Yield the valid example configs of a stage kind; the changed configs are made from these examples."""
    for base in (*EXAMPLES[kind], *BASES.get(kind, ())):
        try:
            KINDS[kind].model_validate(base)
        except ValidationError:
            continue
        yield base


def changes(kind: str) -> Iterator[tuple[int, str, object]]:
    """Yield each valid change of a config field: index of the base config, the field's path and new value."""
    examples = [KINDS[kind].model_validate(example) for example in EXAMPLES[kind]]
    for path in paths(kind):
        if path[0] == "execution":
            continue
        found = {}
        for example, other in variants(kind, path):
            value = functools.reduce(inside, path[:-1], other.model_dump(mode="json"))[path[-1]]
            found.setdefault(json.dumps(value), (examples.index(example), "/".join(path), value))
        takes_any_text = any(text in found for text in ANY_TEXT)
        words = [change for change in found.values() if isinstance(change[2], str) and not takes_any_text]
        others = [change for change in found.values() if change not in words]
        yield from (*words, *others[:VALUES_PER_FIELD])


def frozen() -> dict:
    """Return `frozen_versions.json`'s contents: example configs of each stage kind, and digests.

    A row of digests is `[number of the example config, path of the changed field, value, version, resume key]`.
    """
    kinds = {}
    for kind in KINDS:
        bases = [*valid_bases(kind)]
        rows = [*((number, "", None) for number in range(len(bases))), *changes(kind)]
        digests = [[*row, *digests_of(config_of(kind, bases[row[0]], *row[1:]))] for row in rows]
        kinds[kind] = {"bases": bases, "digests": digests}
    return kinds


def write(path: Path) -> None:
    """Write `frozen_versions.json` with one config a line, so that a diff shows which configs changed."""
    lists = {
        f"{kind} {name}": ",\n".join(f"   {json.dumps(row)}" for row in rows)
        for kind, held in frozen().items()
        for name, rows in held.items()
    }
    text = ",\n".join(f'  "{name}": [\n{lines}\n  ]' for name, lines in lists.items())
    path.write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    write(FROZEN)
