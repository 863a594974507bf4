"""Whether llama.cpp cuts real rows into the tokens that the model was trained with: asked of its own server."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from stages.core.errors import ModelError
from stages.core.redaction import quoted
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.llama_cpp.queries import tokenize
from stages.serving.registry import new_launch_spec
from stages.serving.server import started_server

MAX_MODEL_LEN = 512
"""Of a server that is asked for nothing but token ids."""
NUM_SHOWN = 60


def problem_of_token_ids(model: Path, samples: Sequence[Sequence[int]]) -> ModelError | None:
    """Return an error for the first row whose token ids differ.

    model: a folder with a GGUF file and the tokenizer that it was made of. samples: token ids, a list a row.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.decode(sample) for sample in samples]
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    begun = tokenizer(texts[0])["input_ids"]
    serving = ServingConfig(engine="llama_cpp", max_model_len=MAX_MODEL_LEN, max_num_seqs=1)
    execution = ServeExecution()
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        spec = new_launch_spec(model.resolve(), "model", serving)
        with started_server(spec, execution, Path(folder) / "server.log", Path(folder) / "server") as server:
            server.wait_until_ready(execution.ready_timeout_s)
            found = tokenize(server.address, server.api_key, texts, add_special=False)
            found_begun = tokenize(server.address, server.api_key, texts[:1], add_special=True)[0]
    for text, ids, theirs in zip([*texts, texts[0]], [*expected, begun], [*found, found_begun], strict=True):
        if ids != theirs:
            at = next((i for i, pair in enumerate(zip(ids, theirs, strict=False)) if pair[0] != pair[1]), len(ids))
            return ModelError(
                f"llama.cpp cuts a row into other tokens than the model's tokenizer: {quoted(text, NUM_SHOWN)} is "
                f"{len(ids)} tokens, and {len(theirs)} there; they differ from token {at} on. Choose another method"
            )
    return None
