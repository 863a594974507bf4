"""Test program: `fsdp_program` under a plan that does not say whose gradients are to be summed over `tp`."""

from transformers.models.qwen3 import Qwen3Config

from tests.parity import fsdp_program


def main() -> None:
    plan = Qwen3Config.base_model_tp_plan
    Qwen3Config.base_model_tp_plan = {name: style for name, style in plan.items() if not style.startswith("replicated")}
    fsdp_program.main()
