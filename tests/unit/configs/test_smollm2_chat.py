"""The SmolLM2 chat recipe also works with a local model and local dataset files instead of those on the hub."""

import json

import pytest

from flows.cli.main import main
from stages.hubs.builtin import qwen3
from tests.unit.configs.test_recipes import CONFIGS


def test_model_and_rows_may_be_files_of_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    qwen3.make(tmp_path / "model")
    (tmp_path / "rows").mkdir()
    for split in ("train_sft", "test_sft"):
        turns = [{"role": "user", "content": f"Which word is {split}?"}, {"role": "assistant", "content": "That one."}]
        (tmp_path / "rows" / f"{split}.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    replaced = [f"stages.base.model=file://{tmp_path / 'model'}", f"stages.chats.dataset=file://{tmp_path / 'rows'}"]
    options = [word for one in replaced for word in ("--set", one)]
    for command, shown in ((["plan"], "7 of 7 stages will run"), (["data", "--stage", "sft"], "⟦That one.<|im_end|>⟧")):
        with pytest.raises(SystemExit) as ended:
            main([command[0], str(CONFIGS / "smollm2-chat.yaml"), *command[1:], *options])
        output = capsys.readouterr()
        assert ended.value.code == 0, output.err
        assert shown in output.out
