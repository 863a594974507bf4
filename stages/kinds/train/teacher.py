"""What a teacher says of the targets of a dataset: its likeliest tokens, computed once and cached by content.

A teacher is a server, or a model that is loaded before the one that learns, under the same layout, and freed: only one
model is held at a time, unless the teacher is asked on about what the model answers. The cache is an array on disk, a
record a target, under a name made of everything that decides it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue

from stages.core.contract import StageContext, is_main_process
from stages.core.errors import LifecycleError, ModelError, RecipeError, ServerError, TransientError
from stages.core.keys import key_in
from stages.core.redaction import redact, shortened
from stages.data.batch import Batch, Candidates
from stages.data.cache import content_key, is_intact, is_sealed, write_seal
from stages.data.dataset import PackedDataset
from stages.engines.engine import Engine
from stages.kinds.train.blocks import TrainExecution
from stages.kinds.train.check_model import check_model
from stages.kinds.train.checkpoints import check_free_disk
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.method import TeacherServer, TeacherTokens
from stages.kinds.train.order import even_micro_batches
from stages.kinds.train.reference import model_digest
from stages.kinds.train.watchdog import Watchdog
from stages.models.model_config import read_config
from stages.models.model_folder import vocabulary_size
from stages.models.shape import ModelShape
from stages.parallel.processes import gathered
from stages.serving.client import Client
from stages.serving.completions import token_number

if TYPE_CHECKING:
    from stages.rollouts.asking import Answer, Request

PROBE = "In 2026, 3 × 14 = 42: naïve façade, 数 and\n\tdef f(x): return x ** 2  # “so”"
"""Text of several kinds, which two tokenizers are unlikely to cut alike."""
CHECK_TIMEOUT_S = 60.0
ROWS_TOGETHER = 64
Document = Sequence[int]


@dataclass(frozen=True)
class ServedTeacher:
    """See `stages.kinds.train.teacher.Teacher`."""

    client: Client
    server: TeacherServer
    number: int
    execution: TrainExecution

    @classmethod
    def of(cls, asked: TeacherTokens, execution: TrainExecution) -> Self:
        """Raises RecipeError for a variable that is not set."""
        server = asked.server
        assert server
        key = key_in(server.key_variable, "teacher_server.key_variable")
        url = server.url.rstrip("/").removesuffix("/v1")
        client = Client(url, key, server.served_model, execution.rollout_timeout_s)
        return cls(client, server, asked.number, execution)

    @property
    def identity(self) -> dict[str, JsonValue]:
        return {"url": self.client.url, "served_model": self.client.model}

    def check(self, model_folder: Path, *, trust_remote_code: bool) -> None:
        """Ask it about a short text. Raises ServerError for one that does not serve the model, or gives too few
        log-probabilities, ModelError for another tokenizer than that of `model_folder`, TransientError for no answer.
        """
        try:
            self._check_model(model_folder, trust_remote_code)
        except ServerError as error:
            raise ServerError(self._without_key(error)) from None
        except TransientError as error:
            raise TransientError(f"{error}; start the teacher's server, or correct `teacher_server.url`") from error

    def _check_model(self, model_folder: Path, trust_remote_code: bool) -> None:
        client = replace(self.client, timeout_s=CHECK_TIMEOUT_S)
        client.check_lists_model("the teacher's server", "; name one of these (`teacher_server.served_model`)")
        own = self._own_tokens(model_folder, trust_remote_code)
        choice = client.complete(PROBE, max_tokens=1, add_special_tokens=False, return_token_ids=True)
        its = choice.prompt_token_ids
        if its is None:
            raise ServerError(
                f"the teacher's server at {self.client.url} does not say which tokens it read (`prompt_token_ids`), as "
                "vLLM does since 0.11; serve the teacher by vLLM, or name its stage (`teacher`)"
            )
        if its != own:
            raise ModelError(
                f"the teacher that {self.client.url} serves has another tokenizer than the model in {model_folder}: "
                f"{PROBE!r} is {shortened(str(its), 500)} there, "
                f"and {own} here; take a teacher of the same family, or learn from what it "
                "writes (`kind: generate`, and `method: sft`)"
            )
        self.likeliest([own])

    @contextmanager
    def opened(self, context: StageContext, watchdog: Watchdog) -> Iterator[OpenTeacher]:
        """It is open anyway."""
        yield OpenServer(self, context, watchdog)

    def likeliest(self, documents: Sequence[Document]) -> list[NDArray[np.void]]:
        """Of each document, `said_record` [tokens - 1]: the likeliest in the place of each token but the first.

        Raises ServerError for a document that it refuses, TransientError when it is gone for good.
        """
        from stages.rollouts.asking import ask_all  # and aiohttp, which no other training needs

        found: dict[int, NDArray[np.void]] = {}

        def keep(index: int, request: Request, answer: Answer) -> None:
            found[index] = self._read(answer, request["prompt"])

        requests = ((index, self._request(document)) for index, document in enumerate(documents))
        stall_s = self.execution.rollout_timeout_s
        try:
            ask_all(self.client, requests, self.execution.concurrent_requests, keep, stall_s)
        except ServerError as error:
            raise ServerError(
                f"asking the teacher's server for {self.number} log-probabilities a token (`loss_top_k`): "
                f"{self._without_key(error)}; "
                f"vLLM gives so many if it was started with `--max-logprobs {self.number}`, of documents that are "
                "shorter than its `--max-model-len`"
            ) from None
        return [found[index] for index in range(len(documents))]

    def _without_key(self, error: ServerError) -> str:
        """What a server answers may repeat what it was sent."""
        return redact(str(error), [self.client.api_key] if self.client.api_key else [])

    def _request(self, document: Document) -> Request:
        return {
            "model": self.client.model,
            "prompt": list(document),
            "temperature": 0,
            "max_tokens": 1,
            "echo": True,
            "logprobs": self.number,
            "return_tokens_as_token_ids": True,
        }

    def _read(self, answer: Answer, document: Document) -> NDArray[np.void]:
        report = answer.choices[0].reported(self.client.url)
        of_tokens = report.likeliest_of_prompt(len(document), self.client.url)
        found = np.zeros(len(of_tokens), said_record(self.number))
        for place, top in enumerate(of_tokens):
            likeliest = sorted(top.items(), key=lambda item: -item[1])[: self.number]
            if len(likeliest) < self.number:
                raise ServerError(f"it gave {len(likeliest)} at token {place + 1}")
            found["tokens"][place] = [token_number(token, self.client.url) for token, _ in likeliest]
            found["log_probabilities"][place] = [value for _, value in likeliest]
        return found

    def _own_tokens(self, model_folder: Path, trust_remote_code: bool) -> list[int]:
        from transformers import AutoTokenizer  # takes a second

        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        tokens: list[int] = AutoTokenizer.from_pretrained(model_folder, **options).encode(
            PROBE, add_special_tokens=False
        )
        return tokens


@dataclass(frozen=True)
class OpenServer:
    """See `stages.kinds.train.teacher.OpenTeacher`. Both raise what `likeliest` raises."""

    teacher: ServedTeacher
    context: StageContext
    watchdog: Watchdog

    def of_rows(self, dataset: PackedDataset, rows: Sequence[int]) -> Iterator[NDArray[np.void]]:
        for first in range(0, len(rows), ROWS_TOGETHER):
            self.watchdog.begins(f"row {first + 1} of {len(rows)} of the teacher's server")
            documents = [one for row in rows[first : first + ROWS_TOGETHER] for one in dataset.documents(row)]
            if is_main_process():
                found = self.teacher.likeliest([tokens.tolist() for tokens, _ in documents])
                yield np.concatenate([said[loss[1:]] for said, (_, loss) in zip(found, documents, strict=True)])
            gathered(0.0)  # the others wait here, and not for longer than these rows take
            self.context.progress(min(first + ROWS_TOGETHER, len(rows)), len(rows), "rows", "the teacher's server")

    def of_share(self, share_of: ShareOf, data_rank: int, num_shares: int) -> list[NDArray[np.void]]:
        """Rank 0 asks about all shares, and the others read it: processes that have the same rows get the very same."""
        files = [self.context.scratch / "teacher" / f"share-{number}.npy" for number in range(num_shares)]
        if is_main_process():
            files[0].parent.mkdir(parents=True, exist_ok=True)
            shares = [share_of(number) for number in range(num_shares)]
            said = self._of_batches([batch for share in shares for batch in share])
            for file, share in zip(files, shares, strict=True):
                np.save(file, said[: (num_own := sum(map(_num_targets, share)))])
                said = said[num_own:]
        gathered(0.0)  # until now, the file may be that of an earlier step
        found = np.load(files[data_rank])
        gathered(0.0)
        return np.split(found, np.cumsum([_num_targets(batch) for batch in share_of(data_rank)])[:-1])

    def _of_batches(self, batches: Sequence[Batch]) -> NDArray[np.void]:
        """Of all their targets, in order; all documents are asked about together."""
        asked = [document for batch in batches for document in _documents(batch)]
        found = self.teacher.likeliest([tokens for tokens, _ in asked])
        nothing = np.zeros(0, said_record(self.teacher.number))
        return np.concatenate([nothing, *(said[mask] for said, (_, mask) in zip(found, asked, strict=True))])


def _num_targets(batch: Batch) -> int:
    return int(batch.has_target.sum())


def _documents(batch: Batch) -> Iterator[tuple[Document, NDArray[np.bool_]]]:
    """Tokens of each of which something is learned, and which of them but the first are targets."""
    borders = np.cumsum(batch.document_lengths)[:-1].tolist()
    tokens = torch.tensor_split(batch.input_ids.flatten(), borders)
    is_target = torch.tensor_split(batch.has_target.flatten(), borders)
    for one, mask in zip(tokens, is_target, strict=True):
        if mask.any():
            yield one.tolist(), mask.numpy()[:-1]


ShareOf = Callable[[int], list[Batch]]
"""Data rank → micro-batches of its share; any process can say which those are."""


class OpenTeacher(Protocol):
    """A teacher that can be asked. What it says is `said_record`, of targets in their order."""

    def of_rows(self, dataset: PackedDataset, rows: Sequence[int]) -> Iterator[NDArray[np.void]]:
        """rows: sorted. All that it says of them, piece by piece, on rank 0; on the others anything. Collective."""

    def of_share(self, share_of: ShareOf, data_rank: int, num_shares: int) -> list[NDArray[np.void]]:
        """Of each micro-batch of this process's share. Collective."""


def said_record(number: int) -> np.dtype[np.void]:
    """Of a target: the teacher's likeliest tokens, int32 [number], and their log-probabilities, float32 [number]."""
    return np.dtype([("tokens", np.int32, (number,)), ("log_probabilities", np.float32, (number,))])


@dataclass(frozen=True)
class TeacherRows:
    """Rows of a dataset with what the teacher says of their targets."""

    rows: NDArray[np.int64]
    """int64 [rows], sorted: their numbers in the dataset"""
    starts: NDArray[np.int64]
    """int64 [rows + 1]: where the targets of each begin among `said`"""
    said: NDArray[np.void]
    """[targets] of `said_record`; mapped from disk"""
    asked: TeacherTokens
    is_whole_vocabulary: bool

    def attach(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """The batch, made of these rows, with its candidates."""
        found = np.searchsorted(self.rows, rows)
        said = np.concatenate([self.said[:0], *(self.said[self.starts[one] : self.starts[one + 1]] for one in found)])
        return with_candidates(batch, said, self.asked, self.is_whole_vocabulary)


def with_candidates(batch: Batch, said: NDArray[np.void], asked: TeacherTokens, is_whole_vocabulary: bool) -> Batch:
    """said: `said_record` [targets of the batch, in order]."""
    shape = (*batch.targets.shape, asked.number)
    tokens, values = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    tokens[batch.has_target] = torch.from_numpy(said["tokens"].astype(np.int64))
    values[batch.has_target] = torch.from_numpy(np.ascontiguousarray(said["log_probabilities"]))
    candidates = Candidates(tokens, values, is_whole_vocabulary)
    return replace(batch, candidates=candidates, temperature=asked.temperature)


BuildEngine = Callable[[TrainConfig, Path, ModelShape | None], Engine]
"""(what a stage says, folder of a model, its shape) → an engine with that model"""
RowsOf = tuple[PackedDataset, Sequence[int]]
"""A dataset, and rows of it, sorted and without repetitions."""


class Teacher(Protocol):
    """Who is asked. identity: everything that decides what it says, beside what it is asked about."""

    @property
    def identity(self) -> dict[str, JsonValue]: ...

    def opened(self, context: StageContext, watchdog: Watchdog) -> AbstractContextManager[OpenTeacher]:
        """Not called where everything is cached. Collective."""


@dataclass(frozen=True)
class TeacherModel:
    """A model that is asked, and not trained. build: loads it."""

    weights_digest: str
    asked: TeacherTokens
    precision: str
    micro_batch_size: int
    build: Callable[[], Engine]

    @property
    def identity(self) -> dict[str, JsonValue]:
        return {"weights": self.weights_digest, "temperature": self.asked.temperature, "precision": self.precision}

    @contextmanager
    def opened(self, context: StageContext, watchdog: Watchdog) -> Iterator[OpenTeacher]:
        watchdog.begins("loading the teacher")
        engine = self.build()
        try:
            yield OpenModel(engine, self.asked, self.micro_batch_size, context, watchdog)
        finally:
            engine.close()


@dataclass(frozen=True)
class OpenModel:
    """See `OpenTeacher`."""

    engine: Engine
    asked: TeacherTokens
    micro_batch_size: int
    context: StageContext
    watchdog: Watchdog

    def of_rows(self, dataset: PackedDataset, rows: Sequence[int]) -> Iterator[NDArray[np.void]]:
        """Round by round: in each, every share of the processes has a micro-batch."""
        engine, starts = self.engine, _starts(dataset, rows)
        size = self.micro_batch_size * engine.data_parallel_size
        shares = list(even_micro_batches(len(rows), self.micro_batch_size, engine.data_rank, engine.data_parallel_size))
        for index, share in enumerate(shares):
            self.watchdog.begins(f"micro-batch {index + 1} of {len(shares)} of the teacher")
            own = self._of_batch(dataset.batch([rows[position] for position in share], self.micro_batch_size))
            first, last = starts[index * size], starts[min((index + 1) * size, len(rows))]
            of_round = torch.zeros(int(last - first), 2, self.asked.number, dtype=torch.float64)
            if share:
                of_round[int(starts[share[0]] - first) : int(starts[share[-1] + 1] - first)] = own
            yield _recorded(engine.sum_over_data(of_round))
            self.context.progress(index + 1, len(shares), "micro-batches", "the teacher's likeliest tokens")

    def of_share(self, share_of: ShareOf, data_rank: int, num_shares: int) -> list[NDArray[np.void]]:
        return [_recorded(self._of_batch(batch)) for batch in share_of(data_rank)]

    def _of_batch(self, batch: Batch) -> torch.Tensor:
        """float64 [targets, 2, number]: tokens and log-probabilities."""
        answer = self.engine.likeliest_tokens(replace(batch, temperature=self.asked.temperature), self.asked.number)
        return torch.stack([values[batch.has_target].double() for values in answer], 1)


def _recorded(values: torch.Tensor) -> NDArray[np.void]:
    """`said_record` [targets] of [targets, 2, number]."""
    said = np.zeros(len(values), said_record(values.shape[-1]))
    said["tokens"], said["log_probabilities"] = values.unbind(1)
    return said


@dataclass(frozen=True)
class Taught:
    """What a teacher said of datasets' rows; and itself, if it is to be asked about more."""

    rows: Mapping[PackedDataset, TeacherRows] = field(default_factory=dict)
    teacher: OpenTeacher | None = None
    is_whole_vocabulary: bool = False


def ask_teacher(
    config: TrainConfig,
    context: StageContext,
    wanted: Sequence[RowsOf],
    start_digest: str,
    watchdog: Watchdog,
    build: BuildEngine,
    stays: ExitStack,
) -> Taught:
    """What the teacher that a recipe's stage names says of each dataset's rows; collective.

    start_digest: of the weights that training starts from. stays: what ends a teacher that is asked on. Raises
    ModelError or LayoutError for a teacher that the engine or the layout does not allow, ServerError or TransientError
    for a server that does not answer as it should.
    """
    asked = config.teacher_tokens
    assert asked
    teacher = _teacher(config, context, start_digest, build)
    model_folder = context.inputs[config.base or config.model] / "model"
    paths = [_path(teacher, asked, dataset, rows, context.cache) for dataset, rows in wanted]
    missing = [index for index, path in enumerate(paths) if not min(gathered(float(is_intact(path))))]
    for index in missing:
        if is_sealed(paths[index]):
            context.warn(f"the teacher's tokens: {paths[index]} held other bytes than were written: asked again")
    with ExitStack() as stack:
        opened = stack.enter_context(teacher.opened(context, watchdog)) if missing or config.on_policy else None
        for index in missing:
            assert opened
            _write(opened, asked.number, *wanted[index], paths[index])
        if config.on_policy:
            stays.push(stack.pop_all())
        else:
            opened = None
    is_whole = asked.number == vocabulary_size(read_config(model_folder))
    rows = {
        dataset: TeacherRows(np.array(rows), _starts(dataset, rows), np.load(path, mmap_mode="r"), asked, is_whole)
        for (dataset, rows), path in zip(wanted, paths, strict=True)
    }
    return Taught(rows, opened, is_whole)


def _teacher(config: TrainConfig, context: StageContext, start_digest: str, build: BuildEngine) -> Teacher:
    asked = config.teacher_tokens
    assert asked
    if asked.server:
        return ServedTeacher.of(asked, config.execution)
    assert config.teacher
    folder = context.inputs[config.teacher] / "model"
    alone = config.model_copy(update={"adapter": None, "base": None})
    shape, digest = check_model(alone, context, folder), model_digest(folder)
    if digest == start_digest:
        context.warn(f"the teacher, {config.teacher}, is the model that training starts from: there is little to learn")
    size = config.layout.micro_batch_size
    return TeacherModel(digest, asked, config.precision, size, lambda: build(alone, folder, shape))


def _path(teacher: Teacher, asked: TeacherTokens, dataset: PackedDataset, rows: Sequence[int], cache: Path) -> Path:
    identity: dict[str, JsonValue] = {
        **teacher.identity,
        "data": dataset.key,
        "rows": hashlib.sha256(np.array(rows, dtype=np.int64).tobytes()).hexdigest(),
        "number": asked.number,
    }
    return cache / "teacher" / f"{content_key(identity)}.npy"


def _write(teacher: OpenTeacher, number: int, dataset: PackedDataset, rows: Sequence[int], path: Path) -> None:
    """What the teacher says, as it comes; by rank 0 alone."""
    array = _new_file(path, number, int(_starts(dataset, rows)[-1])) if is_main_process() else None
    first = 0
    for piece in teacher.of_rows(dataset, rows):
        if array is not None:
            array[first : first + len(piece)] = piece
            first += len(piece)
    if array is not None:
        assert first == len(array), "the teacher said something of every target"
        array.flush()
        _unfinished(path).replace(path)
        write_seal(path)
    gathered(0.0)  # the others read what the first process has written


def _new_file(path: Path, number: int, num_targets: int) -> np.memmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = said_record(number)
    check_free_disk(path.parent, num_targets * record.itemsize, "teacher's likeliest tokens (distill.loss_top_k)")
    return np.lib.format.open_memmap(_unfinished(path), mode="w+", dtype=record, shape=(num_targets,))


def _starts(dataset: PackedDataset, rows: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], dataset.num_row_targets(rows).cumsum()])


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.npy")


NUM_NAMED = 3


def check_teacher(config: TrainConfig, inputs: Mapping[str, Path], model_folder: Path) -> Iterator[LifecycleError]:
    """What is wrong with the teacher, if the method has one."""
    asked, trusted = config.teacher_tokens, config.trust_remote_code
    if asked and asked.server:
        yield from server_problems(asked, config.execution, model_folder, trust_remote_code=trusted)
    elif asked and config.teacher:
        teacher = inputs[config.teacher] / "model"
        yield from teacher_problems(asked, teacher, model_folder, trust_remote_code=trusted)


def server_problems(
    asked: TeacherTokens, execution: TrainExecution, model: Path, *, trust_remote_code: bool
) -> Iterator[LifecycleError]:
    """What is wrong with a served teacher, which is asked about a few tokens."""
    try:
        if too_many := _too_many(asked, vocabulary_size(read_config(model))):
            yield too_many
        else:
            ServedTeacher.of(asked, execution).check(model, trust_remote_code=trust_remote_code)
    except LifecycleError as error:
        yield error


def teacher_problems(
    asked: TeacherTokens, teacher: Path, model: Path, *, trust_remote_code: bool
) -> Iterator[LifecycleError]:
    """What is wrong with a teacher, of two model folders: another tokenizer or vocabulary, fewer tokens than wanted."""
    try:
        tokens = [_vocabulary(folder, trust_remote_code) for folder in (teacher, model)]
        sizes = [vocabulary_size(read_config(folder)) for folder in (teacher, model)]
    except ModelError as error:
        yield error
        return
    if different := _different_tokens(*tokens):
        named = ", ".join(different[:NUM_NAMED])
        yield ModelError(
            f"the teacher in {teacher} has another tokenizer than the model in {model}: {len(different)} tokens are "
            f"not the same ({named}); take a teacher of the same family, or learn from what it writes (`kind: "
            "generate`, and `method: sft`)"
        )
    elif sizes[0] != sizes[1]:
        yield ModelError(
            f"the teacher in {teacher} has a vocabulary of {sizes[0]} entries, the model in {model} of {sizes[1]}; "
            "take a teacher whose embedding has as many"
        )
    elif too_many := _too_many(asked, sizes[0]):
        yield too_many


def _too_many(asked: TeacherTokens, vocabulary: int | None) -> RecipeError | None:
    if vocabulary is None or asked.number <= vocabulary:
        return None
    return RecipeError(
        f"{asked.number} likeliest tokens of the teacher are asked for, of a vocabulary of {vocabulary}; lower "
        "`loss_top_k`"
    )


def _vocabulary(folder: Path, trust_remote_code: bool) -> dict[str, int]:
    from transformers import AutoTokenizer  # takes a second

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        return AutoTokenizer.from_pretrained(folder, **options).get_vocab()
    except Exception as error:  # tokenizers raises nothing more special
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}") from error


def _different_tokens(one: dict[str, int], other: dict[str, int]) -> list[str]:
    different = [token for token in {**one, **other} if one.get(token) != other.get(token)]
    return [f"{token!r} is {one.get(token)} and {other.get(token)}" for token in sorted(different)]
