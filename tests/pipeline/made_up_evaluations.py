"""Program in place of `flows.champion.promotion` that makes up its repeated evaluation of the champion.

`made_up_evaluations.py WORK` is such an evaluation.
"""

import sys
from pathlib import Path

from flows.champion import promotion
from flows.launch import local
from stages.core.contract import StageInput
from tests.candidates import write_evaluation

RIGHT = 60
"""Number of right answers, of 100, that the champion gets when a promotion evaluates it again (made up)."""


def prompt_of(config: dict[str, object]) -> str:
    return f"{config['num_fewshot']} examples"


def main() -> None:
    command = local.command

    def made_up(work, config):
        return [sys.executable, __file__, str(work)] if config.kind == "evaluate" else command(work, config)

    local.command = made_up
    promotion.main()


def evaluate(work: Path) -> None:
    stage_input = StageInput.model_validate_json((work / "config.json").read_bytes())
    assert (stage_input.inputs["champion"] / "model" / "model.safetensors").is_file()
    write_evaluation(work, [1.0] * RIGHT + [0.0] * (100 - RIGHT), prompt=prompt_of(stage_input.config))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        evaluate(Path(sys.argv[1]))
    else:
        main()
