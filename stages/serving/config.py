"""What a recipe may say of a server: how it holds a model, what load measures it, where it listens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, PositiveFloat, PositiveInt, field_validator

from stages.core.contract import Execution, StrictModel
from stages.core.fields import AddedLater
from stages.core.numbers import Seconds

EngineName = Literal["vllm", "llama_cpp", "sglang", "lmdeploy"]
MOST_STOP_TEXTS = 64
"""Of one request: what every server that a stage starts takes."""
StopTexts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=MOST_STOP_TEXTS)]
"""Of a field: what ends an answer."""


class ServingConfig(StrictModel):
    """How an engine holds a model: everything that may change what it answers, or how fast."""

    engine: Annotated[EngineName | None, AddedLater()] = Field(
        None, description="Default: vllm, but llama_cpp for what `quantize` makes by `method: gguf`."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: that of the weights, but bf16 for those in fp32."
    )
    max_model_len: PositiveInt | None = Field(None, description="Tokens of prompt and answer; default: the model's.")
    max_num_seqs: PositiveInt | None = Field(None, description="Requests in one batch; default: the engine's.")
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs that share each layer.")
    kv_cache_memory_gib: PositiveFloat | None = Field(
        None, description="Default: what the engine finds free on a GPU, 4 on a CPU."
    )
    enforce_eager: bool = Field(False, description="Neither compile nor capture graphs: starts sooner, runs slower.")
    trust_remote_code: bool = Field(False, description="Run the Python files that come with the model.")
    tool_call_parser: Annotated[str | None, AddedLater()] = Field(
        None,
        min_length=1,
        description="The engine's parser that reads calls of tools from answers; default: vllm's for what the chat "
        "template writes around calls, and llama_cpp's own. None: requests with tools are refused.",
    )
    arguments: Annotated[dict[str, JsonValue], AddedLater()] = Field(
        default_factory=dict,
        description="Other options of the engine's own server, without dashes before them → values.",
    )

    @field_validator("arguments")
    @classmethod
    def _spelled_with_dashes(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return {name.removeprefix("--").replace("_", "-"): value for name, value in arguments.items()}


class BenchmarkConfig(StrictModel):
    """Load that is put on the server."""

    concurrencies: tuple[PositiveInt, ...] = Field(
        (1, 8), min_length=1, description="Requests at a time; each is measured."
    )
    requests_per_concurrency: PositiveInt = Field(8, description="Requests sent for each unit of concurrency.")
    input_tokens: PositiveInt = Field(128, description="Of each prompt.")
    output_tokens: PositiveInt = Field(64, description="Of each answer.")

    @property
    def tokens(self) -> int:
        """Of a prompt and its answer together."""
        return self.input_tokens + self.output_tokens


LESS_MEMORY = "lower serving.kv_cache_memory_gib or serving.max_model_len, or raise execution.slots"
"""What to change where the kernel kills a server for lack of memory."""


class ServeExecution(Execution):
    """Where the server listens and how long it may take to start."""

    host: str = Field("127.0.0.1", pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:%_-]*$", description="Address to listen on.")
    port: int | None = Field(None, ge=1, le=65535, description="Default: a free one.")
    ready_timeout_s: Seconds = Field(600, description="How long the server may take to start.")
