"""Program for vLLM's environment: log-probabilities of rows of tokens by many models, one after another.

python vllm_program.py ROWS RESULTS FOLDER …   # RESULTS: a line of JSON before each model, and one after it
"""

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

gc.disable()  # a fifth of vLLM's import

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

CONTEXT_TOKENS = 64


def log_probabilities(folder: str, rows: list[list[int]]) -> list[list[float]]:
    """Return the log-probability of each token of each row but the first, in fp32."""
    options: dict[str, Any] = {"max_model_len": CONTEXT_TOKENS, "max_num_seqs": 4, "enforce_eager": True}
    model = LLM(folder, dtype="float32", enable_prefix_caching=False, **options)
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = model.generate([{"prompt_token_ids": row} for row in rows], asked, use_tqdm=False)
    return [
        [given[token].logprob for given, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)]
        for output, row in zip(outputs, rows, strict=True)
    ]


def reason(error: Exception) -> str:
    """Return an error's words; of pydantic's list of what is wrong with a config, the first; else where it was."""
    listed = error.errors() if hasattr(error, "errors") else ()
    if listed:
        return str(listed[0]["msg"]).removeprefix("Value error, ")
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error}" if f"{error}" else f"{type(error).__name__} at: {place.line}"


def main(rows_file: str, results_file: str, *folders: str) -> None:
    """Compute each model's log-probabilities, up to one that fails, whose error is its result.

    What a failed model leaves behind made others fail that vLLM serves.
    """
    rows = json.loads(Path(rows_file).read_text())
    with Path(results_file).open("a") as results:
        for folder in folders:
            print(json.dumps({"begun": folder}), file=results, flush=True)
            try:
                result: dict[str, Any] = {"log_probabilities": log_probabilities(folder, rows)}
            except Exception as error:
                result = {"reason": reason(error)}
            cleanup_dist_env_and_memory()
            gc.collect()
            gc.freeze()  # what stays of vLLM need not be looked through again, six times a model
            print(json.dumps({"folder": folder, **result}), file=results, flush=True)
            if "reason" in result:
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
