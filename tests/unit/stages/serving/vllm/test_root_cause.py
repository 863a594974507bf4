"""The root cause of a failed start of vLLM is found in its log, here in recorded logs."""

import pytest

from stages.serving.server import last_lines
from stages.serving.vllm.engine import Vllm

PREFIX = "(EngineCore pid=10753) ERROR 11-21 08:44:59 [core.py:1510] "
ENGINE_FAILED = f"""\
(APIServer pid=10700) INFO 11-21 08:44:58 [model.py:733] Resolved architecture: Qwen3ForCausalLM
{PREFIX}EngineCore failed to start.
{PREFIX}Traceback (most recent call last):
{PREFIX}  File "/site-packages/vllm/v1/core/kv_cache_utils.py", line 700, in check_enough_kv_cache_memory
{PREFIX}    raise ValueError(
{PREFIX}ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.
Traceback (most recent call last):
  File "/bin/vllm", line 10, in <module>
    sys.exit(main())
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
WORDLESS = f"""\
{PREFIX}Traceback (most recent call last):
{PREFIX}  File "/site-packages/vllm/model_executor/models/utils.py", line 341, in _load_param
{PREFIX}    weight_loader(param, weight_data)
{PREFIX}  File "/site-packages/vllm/model_executor/layers/vocab_parallel_embedding.py", line 515, in weight_loader
{PREFIX}    assert loaded_weight.shape[output_dim] == self.org_vocab_size
{PREFIX}           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{PREFIX}AssertionError
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
VALIDATION = """\
Traceback (most recent call last):
  File "/site-packages/vllm/config/model.py", line 2152, in __init__
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (4096) is greater than the derived max_model_len (512).
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
DEAD_ENGINE = f"""\
(APIServer pid=9028) INFO 11-22 16:57:07 [launcher.py:195] Route: /v1/completions, Methods: POST
{PREFIX}EngineCore encountered a fatal error.
{PREFIX}Traceback (most recent call last):
{PREFIX}  File "/site-packages/torch/_ops.py", line 1279, in __call__
{PREFIX}    return self._op(*args, **kwargs)
{PREFIX}RuntimeError: Unsupported CPU attention configuration: head_dim=24 isa=1
(APIServer pid=9028) ERROR 11-22 16:57:59 [async_llm.py:906] Traceback (most recent call last):
(APIServer pid=9028) ERROR 11-22 16:57:59 [async_llm.py:906] EngineDeadError: EngineCore encountered an issue.
INFO:      - "POST /v1/completions HTTP/1.1" 500 Internal Server Error
"""
USAGE = """\
usage: vllm serve [model_tag] [options]
vllm serve: error: argument --dtype: invalid choice: 'float99' (choose from 'auto', 'bfloat16')
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (ENGINE_FAILED, "ValueError: No available memory for the cache blocks."),
        (VALIDATION, "max_model_len (4096) is greater than the derived max_model_len (512)."),
        (DEAD_ENGINE, "RuntimeError: Unsupported CPU attention configuration: head_dim=24"),
        (USAGE, "argument --dtype: invalid choice: 'float99'"),
        (WORDLESS, "line 515, in weight_loader assert loaded_weight.shape[output_dim] == self.org_vocab_size"),
    ],
)
def test_names_the_first_exception_and_not_its_consequence(log: str, expected: str) -> None:
    cause = Vllm().root_cause(log)

    assert cause is not None
    assert expected in cause
    assert "Engine core initialization failed" not in cause
    assert "https://" not in cause


def test_knows_when_a_log_gives_no_reason() -> None:
    log = "INFO starting\n\nINFO loading weights\n"

    assert Vllm().root_cause(log) is None
    assert last_lines(log, 1) == "INFO loading weights"
    assert last_lines("") == "(the log is empty)"


def test_a_reason_without_end_is_shortened() -> None:
    cause = Vllm().root_cause("ValueError: not one of " + "NameOfAnArchitecture, " * 1000)

    assert cause is not None
    assert len(cause) <= 600
