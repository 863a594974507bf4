"""Modules that must start fast, or run without some packages, may not import heavy packages.

Import statements at the top of modules are followed through the whole project; those in functions run later and do not
count. A rule names a part of the project and the heavy packages that importing one of its modules may bring: it holds
for modules that are yet to come, and for whatever they are merged into.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = {
    *("torch", "transformers", "peft", "megatron", "llmcompressor", "tokenizers"),
    *("numpy", "pyarrow", "pandas", "datasets", "lm_eval", "matplotlib"),
    *("prefect", "mlflow", "sqlalchemy", "apprise", "kubernetes", "uvicorn", "starlette"),
    *("aiohttp", "httpx", "huggingface_hub", "modelscope_hub", "requests", "prometheus_client"),
    *("rich", "click", "regex"),
}
MODELS = {"torch", "transformers", "peft"}
DATA = {"numpy", "tokenizers", "torch"}
SERVING = {"aiohttp", "prometheus_client"}
PREFECT = {"prefect", "httpx"}
HUBS = {"httpx", "huggingface_hub", "modelscope_hub"}
RULES = [
    # What reads a recipe, plans, and keeps the ledger and the store: every command does.
    (r".*\.(config|\w+_config|registry|legality|options|execution)", set()),
    (r"flows\.(recipe|ledger|store|planning|compare|tracking)(\..*)?", set()),
    (r"flows\.cli\.main", {"click"}),
    (r"flows\.cli\.render", SERVING),
    (r"flows\.cli(\..*)?", {"click", "rich"}),
    # Programs that stay, beside what they watch, or that start many times a day.
    (r"flows\.champion\.(promotion|champions|registrations)", set()),
    (r"flows\.champion\.key", {"httpx"}),
    (r"flows\.champion(\..*)?", SERVING),
    (r"flows\.launch\.kubernetes\w*", {"kubernetes"}),
    (r"flows\.launch\.serving_manifests", SERVING),
    (r"flows\.servers\.guarded", {"sqlalchemy", "starlette", "uvicorn"}),
    (r"flows\.(launch|servers)(\..*)?", set()),
    # Prefect is imported where things run.
    (r"flows\.running\.(due|flow_runs|refresh)", PREFECT),
    (r"flows\.running(\..*)?", set()),
    (r"flows\.service(\..*)?", {*PREFECT, "apprise"}),
    # Stages, from the bottom up.
    (r"stages\.(core|planner)(\..*)?", set()),
    (r"stages\.remote(\..*)?", {"httpx"}),
    (r"stages\.data\.template_program", set()),
    (r"stages\.data(\..*)?", DATA),
    (
        r"stages\.models\.(layers|loaded_weights|parts|split_states|start_up|stored_tensors|tower_walk|transformers_flops|walk|walk_answer|walk_program)",
        MODELS - {"peft"},
    ),
    (r"stages\.models\.tokenizer_check", {"tokenizers"}),
    (r"stages\.parallel\.(accelerator|cpu_products|devices|processes)", {"torch"}),
    (r"stages\.hubs\.builtin\.(qwen3.*|tokenizer)", {"torch", "transformers", "tokenizers"}),
    (r"stages\.hubs(\..*)?", HUBS),
    (r"stages\.adapters\.(check|effect|experts|lora|lora_linear|quantized|start|targets)", MODELS),
    (r"stages\.serving\.(engine|packaged|packaged_program)", set()),
    (r"stages\.serving\.\w+\.(engine|arguments|option_check|server_program|quantize_program)", set()),
    (r"stages\.serving\.(held_weights|vllm\.in_worker\..*)", {"torch"}),
    (r"stages\.serving(\..*)?", SERVING),
    (r"stages\.rewards\.scoring", DATA),
    (r"stages\.rollouts(\..*)?", {*DATA, "aiohttp"}),
    (r"stages\.harnesses\.(judge\.rating|acting\.playing|bfcl\.asking)", {"aiohttp", "numpy", "tokenizers"}),
    (
        r"stages\.harnesses\.lm_eval\.(picture_tasks|rehearsal|scoring)",
        {"aiohttp", "lm_eval", "datasets", "httpx", "huggingface_hub", "numpy", "tokenizers"},
    ),
    (r"stages\.engines\.(settings|\w+\.families)", set()),
    (r"stages\.engines\.megatron\..*", {*MODELS, "megatron"}),
    (r"stages\.engines(\..*)?", MODELS),
    (r"stages\.kinds\.train\.methods\.(dpo_losses|targets)", {"torch"}),
    (r"stages\.kinds\.train\.(methods(\..*)?|check_model)", set()),
    (r"stages\.kinds\.train\.run", {*DATA, "transformers"}),
    (r"stages\.kinds\.train(\..*)?", {*DATA, *SERVING}),
    (r"stages\.kinds\.quantize\.(run|check|samples|written)", set()),
    (r"stages\.kinds\.quantize(\..*)?", {*SERVING, "torch", "transformers", "numpy", "llmcompressor"}),
    (r"stages\.kinds\.merge\.merging", MODELS - {"peft"}),
    (r"stages\.kinds\.(merge|check|look)\.run", {"transformers"}),
    (r"stages\.kinds\.download\.adapter", {"torch", "transformers"}),
    (r"stages\.kinds\.curate\.nodes", {"numpy", "regex", "torch"}),
    (r"stages\.kinds\.curate(\..*)?", {"numpy", "regex"}),
    (r"stages\.kinds\.generate(\..*)?", {*DATA, *SERVING}),
    (r"stages\.kinds\.(evaluate|serve)\.(run|__main__)", SERVING),
    (r"stages\.kinds\.publish(\..*)?", {*HUBS, "requests"}),
    (r".*", set()),
]
"""Heavy packages that modules may import, by pattern of the module's name; the first pattern that fits counts."""
ELSEWHERE = {
    "stages.data.template_program": {"jinja2"},
    "stages.harnesses.evalscope.program": {"evalscope"},
    "stages.serving.llama_cpp.quantize_program": set(),
    "stages.serving.llama_cpp.server_program": {"xllamacpp"},
    "stages.serving.packaged_program": set(),
    "stages.serving.vllm.in_worker.ipc_handles": {"shared_buffers", "vllm"},
    "stages.serving.vllm.in_worker.sealed_weights": {"safetensors", "torch", "vllm"},
    "stages.serving.vllm.in_worker.shared_buffers": {"torch"},
    "stages.serving.vllm.load_generator": {"vllm"},
    "stages.serving.vllm.option_check": {"vllm"},
}
"""All packages that programs for other virtual environments may import, by the program's module."""


def own_modules():
    """Return the file of each of our modules, by name."""
    files = (file for folder in ("flows", "stages") for file in (ROOT / folder).rglob("*.py"))
    found = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in found.items()}


def imported_at_once(body):
    """Yield the import statements that run when a module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If):
            test = ast.unparse(node.test)
            runs = "TYPE_CHECKING" not in test and "__main__" not in test
            yield from imported_at_once([*(node.body if runs else ()), *node.orelse])
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            yield from imported_at_once(node.body)


def parents_of(module):
    """Yield the parent packages of a module, which Python imports before the module."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


@cache
def imports():
    """Return what each of our modules imports directly: our modules, and top-level names of other packages."""
    modules, found = own_modules(), {}
    for name, file in modules.items():
        targets = {name}
        for node in imported_at_once(ast.parse(file.read_text()).body):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            else:
                targets |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
        targets |= {parent for target in targets for parent in parents_of(target)}
        found[name] = {target if target in modules else target.partition(".")[0] for target in targets} - {name}
    return found


@cache
def ways_from(module):
    """Return all modules loaded by importing a module, each with the chain of imports that leads there."""
    ways, todo = {}, [(module, (module,))]
    while todo:
        here, way = todo.pop()
        for target in imports().get(here, ()):
            if target not in ways:
                ways[target] = (*way, target)
                todo.append((target, ways[target]))
    return ways


def rule_of(module):
    return next((allowed for pattern, allowed in RULES if re.fullmatch(pattern, module)), set())


def test_no_module_brings_a_package_that_its_rule_does_not_list():
    refused = []
    for module in imports():
        ways = ways_from(module)
        refused += [" → ".join(ways[package]) for package in sorted((ways.keys() & HEAVY) - rule_of(module))]
    assert refused == []


def test_each_rule_is_of_use():
    brought = {module: ways_from(module).keys() & HEAVY for module in imports()}
    unused = {}
    for pattern, allowed in RULES:
        fitting = [module for module in brought if re.fullmatch(pattern, module)]
        found = set().union(*(brought.pop(module) for module in fitting))
        if allowed - found or not fitting:
            unused[pattern] = sorted(allowed - found) or "no module has such a name"
    assert unused == {}, "nothing brings these any more; take them out of their rules"


def test_programs_of_other_environments_import_nothing_that_those_lack():
    assert ELSEWHERE.keys() <= imports().keys(), "a program has moved"
    brought = {module: ways_from(module).keys() - imports().keys() - sys.stdlib_module_names for module in ELSEWHERE}
    assert brought == ELSEWHERE


if __name__ == "__main__":
    for module in sorted(imports()):
        print(module, *sorted(ways_from(module).keys() & HEAVY))
