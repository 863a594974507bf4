"""Quantization to GGUF: converts a model's config, tokenizer and safetensors to one `model.gguf` for llama.cpp.

Matrices are stored as the recipe says, embeddings included; those in `ignore` as f16, and vectors as f32. The folder
keeps the rest, such as the tokenizer for evaluations. The file is read back by name, shape and type, and llama.cpp must
tokenize real rows as the model's tokenizer does.

K-quants, made by llama.cpp's library (`k_quantizer`), have 256 numbers in a block. Mixes, such as `q4_k_m`, give more
bits to the matrices that lose most with few: the head, and in some layers the values of attention and the output
projections of feed-forward layers. They are those of `llama-quantize`, but for its exceptions of certain models; no
importance matrix is used.
"""

import json
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUFReader
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stages.core.errors import ModelError, ResourceError
from stages.core.files import write_atomically
from stages.core.redaction import quoted
from stages.core.shipped import install_command
from stages.kinds.quantize.gguf_tokenizer import write_tokenizer
from stages.kinds.quantize.registry import QuantizationJob
from stages.kinds.quantize.written import copy_companions
from stages.models.facts import ModelFacts
from stages.models.linear_layers import matches
from stages.models.loading import load_config, load_tokenizer
from stages.models.model_folder import GGUF_FILE
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.engine import K_BLOCK_SIZE, Quantization, is_k_quant
from stages.serving.llama_cpp import quantize_program
from stages.serving.llama_cpp.engine import find_llama_cpp
from stages.serving.llama_cpp.queries import tokenize
from stages.serving.registry import new_launch_spec
from stages.serving.server import started_server

PROGRAM = Path(quantize_program.__file__)
HEADER = struct.Struct("<3q")
IN_A_LAYER = re.compile(r"blk\.(\d+)\.(attn_v|ffn_down)\.weight")
HEADS = ("output.weight", "token_embd.weight")
SMALLER_BLOCKS = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
"""Fallback type where a row length is no multiple of a K-quant's 256: the next larger one with blocks of 32."""
NUM_FIRST_VALUES = 4
MAX_MODEL_LEN = 512
"""Context length of the llama.cpp server that is started only to tokenize rows."""
NUM_SHOWN = 60
ROTARY_BUFFER = ".rotary_emb.inv_freq"
"""Suffix of a rotary-embedding buffer in old Llama models, which is skipped, as it can be computed."""
ROTARY_FACTORS = "rope_freqs.weight"
NUM_NAMED = 3
NUM_NAMED_MATRICES = 6


def type_of(name: str, row_size: int, mix: str, num_layers: int, *, tied: bool) -> Type:
    """Return the GGUF type of a matrix when the recipe asks for the K-quant mix `mix`.

    name: in the file. row_size: number of inputs. tied: whether the embedding is also the head.
    """
    chosen = Type[mix.removesuffix("_s").removesuffix("_m").upper()]
    in_a_layer = IN_A_LAYER.fullmatch(name)
    more = in_a_layer and mix.endswith("_m") and _gets_more(int(in_a_layer[1]), num_layers)
    # A tied embedding is the head, too, so it gets the head's type.
    if more or name in HEADS[: 2 if tied else 1]:
        chosen = Type.Q6_K
    elif in_a_layer and mix == "q4_k_s":
        # As `llama-quantize` for Q4_K_S: values of the first 4 layers, and ffn_down of the first eighth.
        first = NUM_FIRST_VALUES if in_a_layer[2] == "attn_v" else num_layers // 8
        chosen = Type.Q5_K if int(in_a_layer[1]) < first else chosen
    return chosen if row_size % K_BLOCK_SIZE == 0 else SMALLER_BLOCKS[chosen]


def _gets_more(layer: int, num_layers: int) -> bool:
    """Return whether a mix gives this layer more bits: the first and last eighth, and every third between."""
    # llama.cpp's `use_more_bits`; of 32 layers: 0 to 3, 6, 9, …, 27, 28 to 31.
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


class KQuantizer:
    """Running subprocess in which llama.cpp's library quantizes matrices to K-quants."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]):
        self._process, self._log = process, log

    def quantize(self, values: np.ndarray[Any, Any], stored_as: Type) -> np.ndarray[Any, Any]:
        """Quantize float32 [rows, columns] to uint8 [rows, bytes of a row]; raise ResourceError if the program ends."""
        num_rows, num_columns = values.shape
        block, block_bytes = GGML_QUANT_SIZES[stored_as]
        size = num_rows * num_columns // block * block_bytes
        assert self._process.stdin and self._process.stdout
        blocks = b""
        try:
            self._process.stdin.write(HEADER.pack(stored_as, num_rows, num_columns))
            self._process.stdin.write(np.ascontiguousarray(values, np.float32).data)
            self._process.stdin.flush()
            blocks = self._process.stdout.read(size)  # waits for all of them; fewer come if the program ends
        except BrokenPipeError:
            pass  # its message is in its log
        if len(blocks) != size:
            self._process.wait()
            self._log.seek(0)
            reason = self._log.read().decode(errors="replace").strip() or f"it ended with {self._process.returncode}"
            raise ResourceError(
                f"quantizing a matrix to {stored_as.name} by llama.cpp's library: {reason}; make its environment again "
                f"(`{install_command('llama-cpp')}`), or choose a gguf_type without `_k`"
            )
        return np.frombuffer(blocks, np.uint8).reshape(num_rows, -1)


@contextmanager
def k_quantizer(mix: str) -> Iterator[KQuantizer | None]:
    """Provide the subprocess that quantizes to K-quants; None for another type.

    It ends with its input, and so with us, however we end. Raises ResourceError if llama.cpp is not installed.
    """
    if not is_k_quant(mix):
        yield None
        return
    command: list[str | Path] = [find_llama_cpp().command, "-P", PROGRAM]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert process.stdin and process.stdout
        try:
            yield KQuantizer(process, log)
        finally:
            # First, so that a program that is still writing ends by a broken pipe.
            process.stdout.close()
            with suppress(BrokenPipeError):  # the program has ended without reading all
                process.stdin.close()
            process.wait()


@dataclass(frozen=True)
class SourceTensor:
    """Tensor of the model folder, with the name and type that it gets in the GGUF file."""

    file: Path | None
    name: str
    target: str
    shape: tuple[int, ...]
    stored_as: gguf.GGMLQuantizationType

    @property
    def stored_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.stored_as]
        return int(np.prod(self.shape)) // block * size


def quantize(job: QuantizationJob) -> list[ModelError]:
    """Write the quantized model as a GGUF file; return problems of it, and of llama.cpp's tokens of the samples."""
    source, target, quantization = job.source, job.target, job.quantization
    facts = ModelFacts(source)
    config = facts.config
    architecture: str = config["model_type"]
    target.mkdir()
    tensors = list(_sources(source, config, architecture, quantization))
    writer = gguf.GGUFWriter(target / GGUF_FILE, architecture)
    _write_sizes(writer, config, architecture)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantization.weights.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_tokenizer(writer, facts)
    # GGUF lists all tensors with their sizes before the first value, so the plan is complete before any file is read.
    for tensor in tensors:
        writer.add_tensor_info(tensor.target, tensor.shape, np.dtype(np.float32), tensor.stored_bytes, tensor.stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with k_quantizer(quantization.weights) as of_llama_cpp:
        for number, tensor in enumerate(tensors):
            job.report(number, len(tensors))
            # One at a time: a model in fp32 may not fit into memory.
            values = _values(tensor, source, config, architecture)
            writer.write_tensor_data(_stored(values, tensor.stored_as, of_llama_cpp))
    writer.close()
    copy_companions(source, target)
    described = {**config, "quantization_config": {"quant_method": "gguf", "type": quantization.weights}}
    write_atomically(target / "config.json", json.dumps(described, indent=2))
    problems = [_problem_of_tensors(target / GGUF_FILE, tensors), problem_of_token_ids(target, job.samples)]
    return [problem for problem in problems if problem]


@dataclass(frozen=True)
class StoredTypes:
    """Types of a GGUF file's matrices, to warn of those not in the recipe's type (blocks of 256 do not divide a row).

    matrices: (name in the file, inputs of a row, type) of each tensor that has rows. mix: type that the recipe names.
    """

    matrices: tuple[tuple[str, int, str], ...]
    mix: str

    def metrics(self) -> dict[str, float]:
        """Return the number of matrices of each GGUF type, and for K-quants in a fallback type, as metrics."""
        counts = {f"num_matrices_{name.lower()}": float(count) for name, count in self._counts().items()}
        smaller = {"num_matrices_of_smaller_blocks": float(len(self._fallen_back()))} if is_k_quant(self.mix) else {}
        return {**counts, **smaller}

    def in_words(self) -> str:
        """Return a phrase for the log on a GGUF file's matrices, such as `stored as 12 Q4_K, 3 Q6_K`."""
        return "stored as " + ", ".join(f"{count} {name}" for name, count in self._counts().items())

    def caveats(self) -> Iterator[str]:
        """Yield a warning that names matrices which are stored in more bits than requested, if there are any."""
        larger = self._fallen_back()
        if not larger:
            return
        shown = larger[:NUM_NAMED_MATRICES]
        named = ", ".join(f"{name} ({size} inputs, {stored_as})" for name, size, stored_as in shown)
        more = f" and {len(larger) - NUM_NAMED_MATRICES} more" if len(larger) > NUM_NAMED_MATRICES else ""
        yield (
            f"{len(larger)} of {len(self.matrices)} matrices have rows that blocks of {K_BLOCK_SIZE} do not divide, "
            f"and are stored in a larger type with blocks of 32: {named}{more}"
        )

    def _counts(self) -> Counter[str]:
        counts = Counter(stored_as for _, _, stored_as in self.matrices)
        return Counter(dict(sorted(counts.items())))

    def _fallen_back(self) -> list[tuple[str, int, str]]:
        """Return the matrices that are stored in a fallback type, since K-quant blocks do not divide their rows."""
        smaller = {fallback.name for fallback in SMALLER_BLOCKS.values()}
        return [matrix for matrix in self.matrices if is_k_quant(self.mix) and matrix[2] in smaller]


def stored_types(file: Path, mix: str) -> StoredTypes:
    """Read the types of the matrices in a GGUF file. mix: type that the recipe asks for."""
    # GGUF has the fastest axis first: `shape[0]` is the number of inputs.
    tensors = (one for one in GGUFReader(file).tensors if len(one.shape) > 1)
    return StoredTypes(tuple((one.name, int(one.shape[0]), one.tensor_type.name) for one in tensors), mix)


def _sources(
    source: Path, config: Mapping[str, Any], architecture: str, quantization: Quantization
) -> Iterator[SourceTensor]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (it is no mapping)
                if name.endswith(ROTARY_BUFFER) or (name == "lm_head.weight" and config.get("tie_word_embeddings")):
                    continue
                target = names.get_name(name, try_suffixes=(".weight", ".bias"))
                if target is None:
                    raise ModelError(f"writing {source} as GGUF: {name} has no name there; choose another method")
                shape = tuple(stored.get_slice(name).get_shape())  # from the header: no values are read
                yield SourceTensor(path, name, target, shape, _stored_as(name, target, shape, config, quantization))
    if (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        shape = (_head_dim(config) // 2,)
        yield SourceTensor(None, "", ROTARY_FACTORS, shape, gguf.GGMLQuantizationType.F32)


def _stored_as(
    name: str, target: str, shape: tuple[int, ...], config: Mapping[str, Any], quantization: Quantization
) -> gguf.GGMLQuantizationType:
    """Return the GGUF type of a tensor. name: in the model folder. target: in the GGUF file."""
    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    if matches(name.removesuffix(".weight"), quantization.ignore):
        return gguf.GGMLQuantizationType.F16
    if is_k_quant(quantization.weights):
        tied = bool(config.get("tie_word_embeddings"))
        return type_of(target, shape[-1], quantization.weights, config["num_hidden_layers"], tied=tied)
    return gguf.GGMLQuantizationType[quantization.weights.upper()]


def _stored(
    values: np.ndarray[Any, Any], stored_as: gguf.GGMLQuantizationType, of_llama_cpp: KQuantizer | None
) -> np.ndarray[Any, Any]:
    """Return a tensor's values quantized to its GGUF type, as an array of bytes."""
    if of_llama_cpp and stored_as.name.endswith("_K"):
        return of_llama_cpp.quantize(values, stored_as)
    return gguf.quants.quantize(values, stored_as)


def _values(tensor: SourceTensor, source: Path, config: Mapping[str, Any], architecture: str) -> np.ndarray[Any, Any]:
    """Read a tensor's values from the model folder as float32, reordered where GGUF has another order."""
    if tensor.file is None:
        return _rotary_factors(source)
    with safe_open(tensor.file, framework="pt") as stored:
        values = stored.get_tensor(tensor.name).float().numpy()
    if not np.isfinite(values).all():
        raise ModelError(f"writing {source} as GGUF: {tensor.name} holds NaN or inf; train the model again")
    if architecture == "llama":
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        layer = tensor.name.split(".")[-2]
        return _interleaved(values, heads[layer]) if layer in heads else values
    return values


def _interleaved(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorder each head's query or key rows for llama.cpp's rotary pairs (2i, 2i + 1), from (i, i + half)."""
    # [heads, 2, head_dim / 2, inputs] -> [heads, head_dim / 2, 2, inputs]: rows 0 1 2 3 of a head -> 0 2 1 3.
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _rotary_factors(source: Path) -> np.ndarray[Any, Any]:
    """Return the factors by which llama.cpp divides Llama 3.1's rotary frequencies: float32 [head_dim / 2]."""
    config = load_config(source)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))  # inverse frequencies [head_dim / 2]
    dim = 2 * len(scaled)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return (plain / scaled).numpy()


def _write_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any], architecture: str) -> None:
    rotary = config.get("rope_parameters") or config
    writer.add_name(f"{architecture} by llm-lifecycle")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rotary.get("rope_theta", config.get("rope_theta", 10_000.0)))


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _problem_of_tensors(path: Path, expected: list[SourceTensor]) -> ModelError | None:
    """Return an error unless a GGUF file holds exactly the expected tensors by name, shape and type; values: see KL."""
    written = {
        tensor.name: (tuple(map(int, reversed(tensor.shape))), tensor.tensor_type)  # GGUF has the fastest axis first
        for tensor in gguf.GGUFReader(path).tensors
    }
    planned = {source.target: (source.shape, source.stored_as) for source in expected}
    if wrong := sorted(name for name in {*written, *planned} if written.get(name) != planned.get(name)):
        return ModelError(
            f"{path} holds {len(written)} tensors, expected {len(planned)}; missing or of another shape or type: "
            f"{', '.join(wrong[:NUM_NAMED])}; please report it"
        )
    return None


def problem_of_token_ids(model: Path, samples: Sequence[Sequence[int]]) -> ModelError | None:
    """Return an error if llama.cpp tokenizes a sample otherwise than the model's tokenizer, else None.

    model: folder with a GGUF file and its tokenizer. samples: token ids, a list a row.
    """
    tokenizer = load_tokenizer(model)
    texts = [tokenizer.decode(sample) for sample in samples]
    # Not the samples' own ids: what is compared is how both cut the same text.
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    begun = tokenizer(texts[0])["input_ids"]  # with the special tokens around a text, such as BOS
    serving = ServingConfig(engine="llama_cpp", max_model_len=MAX_MODEL_LEN, max_num_seqs=1)
    execution = ServeExecution()
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        spec = new_launch_spec(model.resolve(), "model", serving)
        with started_server(spec, execution, Path(folder) / "server.log", Path(folder) / "server") as server:
            server.wait_until_ready(execution.ready_timeout_s)
            tokenized = tokenize(server.address, server.api_key, texts, add_special=False)
            tokenized += tokenize(server.address, server.api_key, texts[:1], add_special=True)
    for text, ids, theirs in zip([*texts, texts[0]], [*expected, begun], tokenized, strict=True):
        if ids != theirs:
            at = next((i for i, pair in enumerate(zip(ids, theirs, strict=False)) if pair[0] != pair[1]), len(ids))
            return ModelError(
                f"llama.cpp cuts a row into other tokens than the model's tokenizer: {quoted(text, NUM_SHOWN)} is "
                f"{len(ids)} tokens, and {len(theirs)} there; they differ from token {at} on. Choose another method"
            )
    return None
