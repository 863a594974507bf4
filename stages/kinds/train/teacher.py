"""Teacher of distillation: its likeliest tokens at each target, computed before or during training, and cached on disk.

A teacher is a server, or a model that is loaded before the one that learns, under the same layout, and freed: only one
model is in memory, unless the teacher is asked about the model's own answers (on-policy). The cache, a record per
target, has everything that decides it in its key.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue

from stages.core.cache import content_key, is_intact, is_sealed, write_seal
from stages.core.contract import StageContext, is_main_process
from stages.core.errors import LifecycleError, ModelError, RecipeError, ServerError, TransientError
from stages.core.redaction import redact, shortened
from stages.data.batch import Batch, Candidates
from stages.data.dataset import PackedDataset
from stages.engines.engine import Engine
from stages.kinds.train.blocks import TrainExecution
from stages.kinds.train.check_model import InputModels, check_model
from stages.kinds.train.checkpoints import check_free_disk
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.method import TeacherServer, TeacherTokens
from stages.kinds.train.order import even_micro_batches
from stages.kinds.train.reference import model_digest
from stages.kinds.train.watchdog import Watchdog
from stages.models.facts import ModelFacts
from stages.models.loading import load_tokenizer
from stages.parallel.processes import gathered
from stages.remote.http import key_in
from stages.serving.client import Client, token_number

if TYPE_CHECKING:
    from stages.rollouts.asking import Answer, Request

PROBE = "In 2026, 3 × 14 = 42: naïve façade, 数 and\n\tdef f(x): return x ** 2  # “so”"
"""Text by which different tokenizers are detected: with languages and code that few tokenizers split equally."""
CHECK_TIMEOUT_S = 60.0
ROWS_TOGETHER = 64
Document = Sequence[int]
ShareOf = Callable[[int], list[Batch]]
"""Function that returns the micro-batches of a data-parallel rank; every process can call it for any rank."""
BuildEngine = Callable[[TrainConfig, ModelFacts], Engine]
"""Function that builds a training engine with its model, from a training config and the model's `ModelFacts`."""
RowsOf = tuple[PackedDataset, Sequence[int]]
"""Pair of a dataset and the sorted, distinct numbers of some of its rows."""
NUM_NAMED = 3


def check_teacher(config: TrainConfig, models: InputModels) -> Iterator[LifecycleError]:
    """Check that a distillation's teacher suits the model, and yield problems; none without a teacher."""
    asked, trusted = config.teacher_tokens, config.trust_remote_code
    if asked and asked.server:
        yield from server_problems(asked, config.execution, models.start, trust_remote_code=trusted)
    elif asked and models.teacher:
        yield from teacher_problems(asked, models.teacher, models.start, trust_remote_code=trusted)


def server_problems(
    asked: TeacherTokens, execution: TrainExecution, model: ModelFacts, *, trust_remote_code: bool
) -> Iterator[LifecycleError]:
    """Check by a request of a few tokens that the teacher's server suits the model; yield the problems."""
    try:
        if too_many := _too_many(asked, model.vocabulary_size):
            yield too_many
        else:
            ServedTeacher.of(asked, execution).check(model.folder, trust_remote_code=trust_remote_code)
    except LifecycleError as error:
        yield error


def teacher_problems(
    asked: TeacherTokens, teacher: ModelFacts, model: ModelFacts, *, trust_remote_code: bool
) -> Iterator[LifecycleError]:
    """Yield reasons why a teacher's model does not fit: tokenizer, vocabulary size, or too large a `loss_top_k`."""
    try:
        loaded = [load_tokenizer(facts.folder, trust_remote_code=trust_remote_code) for facts in (teacher, model)]
        tokens = [tokenizer.get_vocab() for tokenizer in loaded]
        sizes = [teacher.vocabulary_size, model.vocabulary_size]
    except ModelError as error:
        yield error
        return
    if different := _different_tokens(*tokens):
        named = ", ".join(different[:NUM_NAMED])
        yield ModelError(
            f"the teacher in {teacher.folder} has another tokenizer than the model in {model.folder}: "
            f"{len(different)} tokens are not the same ({named}); take a teacher of the same "
            "family, or train on its answers (`kind: generate`, and `method: sft`)"
        )
    elif sizes[0] != sizes[1]:
        yield ModelError(
            f"the teacher in {teacher.folder} has a vocabulary of {sizes[0]} entries, the model in {model.folder} of "
            f"{sizes[1]}; take a teacher with an embedding of the same size"
        )
    elif too_many := _too_many(asked, sizes[0]):
        yield too_many


def ask_teacher(
    config: TrainConfig,
    context: StageContext,
    models: InputModels,
    wanted: Sequence[RowsOf],
    *,
    start_digest: str,
    watchdog: Watchdog,
    build: BuildEngine,
    teacher_lifetime: ExitStack,
) -> TeacherTargets:
    """Return the teacher's likeliest tokens at the targets of dataset rows, from the cache or newly computed.

    Collective. start_digest: of the weights that training starts from. teacher_lifetime: closes a teacher asked during
    training. Raises ModelError or LayoutError for a teacher that the engine or the layout does not allow, ServerError
    or TransientError for a server that does not answer as it should.
    """
    asked = config.teacher_tokens
    assert asked
    teacher = _teacher(config, context, models.teacher, start_digest, build)
    paths = [_path(teacher, asked, dataset, rows, context.cache) for dataset, rows in wanted]
    # Asking is collective, so all must agree: a file counts only if every process finds it intact.
    missing = [index for index, path in enumerate(paths) if not min(gathered(float(is_intact(path))))]
    for index in missing:
        if is_sealed(paths[index]):
            context.warn(f"the teacher's tokens: {paths[index]} was damaged, so the teacher is asked again")
    with ExitStack() as stack:
        opened = stack.enter_context(teacher.opened(context, watchdog)) if missing or config.on_policy else None
        for index in missing:
            assert opened
            _write(opened, asked.number, *wanted[index], paths[index])
        if config.on_policy:
            # not closed at the end of this block: the teacher is asked about the model's own answers all along
            teacher_lifetime.push(stack.pop_all())
        else:
            opened = None
    is_whole = asked.number == models.start.vocabulary_size
    rows = {
        # Memory-mapped: 64 tokens a target take 512 bytes, so a million targets take half a gigabyte.
        dataset: TeacherRows(np.array(rows), _starts(dataset, rows), np.load(path, mmap_mode="r"), asked, is_whole)
        for (dataset, rows), path in zip(wanted, paths, strict=True)
    }
    return TeacherTargets(rows, opened, is_whole)


@dataclass(frozen=True)
class TeacherTargets:
    """Teacher's likeliest tokens at the targets of dataset rows, and the loaded teacher if it is still needed."""

    rows: Mapping[PackedDataset, TeacherRows] = field(default_factory=dict)
    teacher: OpenTeacher | None = None
    is_whole_vocabulary: bool = False


class Teacher(Protocol):
    """Protocol of an unopened teacher for distillation. identity: all that decides its answers but the documents."""

    @property
    def identity(self) -> dict[str, JsonValue]: ...

    def opened(self, context: StageContext, watchdog: Watchdog) -> AbstractContextManager[OpenTeacher]:
        """Load the teacher, and free it at the end. Collective; skipped where all of its tokens are cached."""


class OpenTeacher(Protocol):
    """Protocol of an opened teacher, which returns its likeliest tokens and their log-probabilities at each target."""

    def of_rows(self, dataset: PackedDataset, rows: Sequence[int]) -> Iterator[NDArray[np.void]]:
        """Yield the teacher's likeliest tokens at all targets in `rows` (sorted), in consecutive arrays. Collective.

        Only rank 0 gets the right values.
        """

    def of_share(self, share_of: ShareOf, data_rank: int, num_shares: int) -> list[NDArray[np.void]]:
        """Return the teacher's likeliest tokens for each micro-batch in this process's share. Collective."""


def record_dtype(number: int) -> np.dtype[np.void]:
    """Return the dtype of a target's `number` likeliest tokens (int32) and their log-probabilities (float32, nats)."""
    return np.dtype([("tokens", np.int32, (number,)), ("log_probabilities", np.float32, (number,))])


@dataclass(frozen=True)
class TeacherRows:
    """Dataset rows with the teacher's likeliest tokens at their targets."""

    rows: NDArray[np.int64]
    """Row numbers within the dataset, int64 [rows], sorted."""
    starts: NDArray[np.int64]
    """Index of each row's first target in `records`, int64 [rows + 1]."""
    records: NDArray[np.void]
    """Teacher's likeliest tokens at all targets, [targets] of `record_dtype`, memory-mapped from disk."""
    asked: TeacherTokens
    is_whole_vocabulary: bool

    def attach(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """Return the batch with the teacher's likeliest tokens, read from the cache, added at its targets."""
        starts = self.starts
        places = np.searchsorted(self.rows, rows)
        pieces = [self.records[starts[place] : starts[place + 1]] for place in places]
        # The empty slice is for a micro-batch of padding alone, which has no pieces but needs the dtype.
        records = np.concatenate([self.records[:0], *pieces])
        return with_candidates(batch, records, self.asked, self.is_whole_vocabulary)


def with_candidates(batch: Batch, records: NDArray[np.void], asked: TeacherTokens, is_whole_vocabulary: bool) -> Batch:
    """Return the batch with the teacher's likeliest tokens, `record_dtype` [targets], for the distillation loss."""
    shape = (*batch.signal.targets.shape, asked.number)
    # [rows, sequence, k]; what stays 0, where no target is, is masked out of the loss
    tokens, values = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    tokens[batch.signal.has_target] = torch.from_numpy(records["tokens"].astype(np.int64))
    values[batch.signal.has_target] = torch.from_numpy(np.ascontiguousarray(records["log_probabilities"]))
    candidates = Candidates(tokens, values, is_whole_vocabulary)
    return batch.with_signal(candidates=candidates, temperature=asked.temperature)


@dataclass(frozen=True)
class ServedTeacher:
    """Teacher on a server that others started, which rank 0 asks over HTTP; implements `Teacher`."""

    client: Client
    server: TeacherServer
    number: int
    execution: TrainExecution

    @classmethod
    def of(cls, asked: TeacherTokens, execution: TrainExecution) -> Self:
        """Return the teacher's server that the recipe names; RecipeError for an unset environment variable."""
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
        """Check by a short text that the server has the model, the same tokenizer and enough log-probabilities.

        Raises ServerError, ModelError for another tokenizer than that of `model_folder`, TransientError for no answer.
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
        served_tokens = choice.prompt_token_ids
        if served_tokens is None:
            raise ServerError(
                f"the teacher's server at {self.client.url} does not return the tokens it read (`prompt_token_ids`), "
                "as vLLM does since 0.11; serve the teacher by vLLM, or name its stage (`teacher`)"
            )
        if served_tokens != own:
            raise ModelError(
                f"the teacher that {self.client.url} serves has another tokenizer than the model in {model_folder}: "
                f"{PROBE!r} is {shortened(str(served_tokens), 500)} there, and {own} here; take a teacher of the same "
                "family, or train on its answers (`kind: generate`, and `method: sft`)"
            )
        self.likeliest([own])

    @contextmanager
    def opened(self, context: StageContext, watchdog: Watchdog) -> Iterator[OpenTeacher]:
        """Yield the teacher's server through the interface of a loaded teacher (`OpenTeacher`); no model is loaded."""
        yield OpenServer(self, context, watchdog)

    def likeliest(self, documents: Sequence[Document]) -> list[NDArray[np.void]]:
        """Return the likeliest tokens at each position but the first, `record_dtype` [tokens - 1] per document.

        Raises ServerError for a document that the server refuses, TransientError when the server is gone.
        """
        from stages.rollouts.asking import ask_all  # and aiohttp, which no other training needs

        records: dict[int, NDArray[np.void]] = {}

        def keep(index: int, request: Request, answer: Answer) -> None:
            records[index] = self._read(answer, request["prompt"])

        requests = ((index, self._request(document)) for index, document in enumerate(documents))
        stall_s = self.execution.rollout_timeout_s
        try:
            ask_all(self.client, requests, self.execution.concurrent_requests, keep, stall_s)
        except ServerError as error:
            raise ServerError(
                f"asking the teacher's server for {self.number} log-probabilities a token (`loss_top_k`): "
                f"{self._without_key(error)}; "
                f"vLLM gives so many if it was started with `--max-logprobs {self.number}`, for documents shorter than "
                "its `--max-model-len`"
            ) from None
        return [records[index] for index in range(len(documents))]

    def _without_key(self, error: ServerError) -> str:
        """Return the error's message without the API key, since a server may repeat what it was sent."""
        return redact(str(error), [self.client.api_key] if self.client.api_key else [])

    def _request(self, document: Document) -> Request:
        return {
            "model": self.client.model,
            "prompt": list(document),
            "temperature": 0,
            # The new token is not read: `echo` with `logprobs` reports on the prompt's own tokens.
            "max_tokens": 1,
            "echo": True,
            "logprobs": self.number,
            "return_tokens_as_token_ids": True,
        }

    def _read(self, answer: Answer, document: Document) -> NDArray[np.void]:
        report = answer.choices[0].reported(self.client.url)
        of_tokens = report.likeliest_of_prompt(len(document), self.client.url)
        records = np.zeros(len(of_tokens), record_dtype(self.number))
        for place, top in enumerate(of_tokens):
            # vLLM adds the prompt's own token where it is not among the k likeliest: up to k + 1 come back.
            likeliest = sorted(top.items(), key=lambda item: -item[1])[: self.number]
            if len(likeliest) < self.number:
                raise ServerError(f"it gave {len(likeliest)} at token {place + 1}")
            records["tokens"][place] = [token_number(token, self.client.url) for token, _ in likeliest]
            records["log_probabilities"][place] = [value for _, value in likeliest]
        return records

    def _own_tokens(self, model_folder: Path, trust_remote_code: bool) -> list[int]:
        tokenizer = load_tokenizer(model_folder, trust_remote_code=trust_remote_code)
        tokens: list[int] = tokenizer.encode(PROBE, add_special_tokens=False)
        return tokens


@dataclass(frozen=True)
class OpenServer:
    """Connection to the teacher's server (an `OpenTeacher`); raises as `ServedTeacher.likeliest`."""

    teacher: ServedTeacher
    context: StageContext
    watchdog: Watchdog

    def of_rows(self, dataset: PackedDataset, rows: Sequence[int]) -> Iterator[NDArray[np.void]]:
        for first in range(0, len(rows), ROWS_TOGETHER):
            self.watchdog.begins(f"row {first + 1} of {len(rows)} of the teacher's server")
            documents = [item for row in rows[first : first + ROWS_TOGETHER] for item in dataset.documents(row)]
            if is_main_process():
                records = self.teacher.likeliest([tokens.tolist() for tokens, _ in documents])
                # Record t is about token t + 1: kept where that token is learned.
                yield np.concatenate([record[loss[1:]] for record, (_, loss) in zip(records, documents, strict=True)])
            gathered(0.0)  # the others wait here, and not for longer than these rows take
            self.context.progress(min(first + ROWS_TOGETHER, len(rows)), len(rows), "rows", "the teacher's server")

    def of_share(self, share_of: ShareOf, data_rank: int, num_shares: int) -> list[NDArray[np.void]]:
        """Return the teacher's tokens for this process's share; rank 0 asks the server for all shares and writes files.

        The other processes read the files. So processes that split one model get identical values.
        """
        files = [self.context.scratch / "teacher" / f"share-{number}.npy" for number in range(num_shares)]
        if is_main_process():
            files[0].parent.mkdir(parents=True, exist_ok=True)
            shares = [share_of(number) for number in range(num_shares)]
            records = self._of_batches([batch for share in shares for batch in share])
            for file, share in zip(files, shares, strict=True):
                np.save(file, records[: (num_own := sum(map(_num_targets, share)))])
                records = records[num_own:]
        gathered(0.0)  # before it, the file may be an earlier step's
        own = np.load(files[data_rank])
        gathered(0.0)  # and rank 0 overwrites it only when all have read
        # targets of the micro-batches [3, 2, 4] -> borders [3, 5]
        return np.split(own, np.cumsum([_num_targets(batch) for batch in share_of(data_rank)])[:-1])

    def _of_batches(self, batches: Sequence[Batch]) -> NDArray[np.void]:
        """Return the teacher's likeliest tokens at all targets of the batches, in order, asked for together."""
        asked = [document for batch in batches for document in _documents(batch)]
        records = self.teacher.likeliest([tokens for tokens, _ in asked])
        nothing = np.zeros(0, record_dtype(self.teacher.number))
        return np.concatenate([nothing, *(record[mask] for record, (_, mask) in zip(records, asked, strict=True))])


def _num_targets(batch: Batch) -> int:
    return int(batch.signal.has_target.sum())


def _documents(batch: Batch) -> Iterator[tuple[Document, NDArray[np.bool_]]]:
    """Yield documents with targets, as tokens and a mask [tokens - 1] of positions whose next token is a target."""
    # The padding of each row is a document, too, so the lengths cover the flattened batch.
    borders = np.cumsum(batch.documents.lengths)[:-1].tolist()
    tokens = torch.tensor_split(batch.inputs.input_ids.flatten(), borders)
    is_target = torch.tensor_split(batch.signal.has_target.flatten(), borders)
    for document, mask in zip(tokens, is_target, strict=True):
        if mask.any():  # padding has no targets
            yield document.tolist(), mask.numpy()[:-1]


@dataclass(frozen=True)
class TeacherModel:
    """Teacher whose model comes from a stage of the recipe (a `Teacher`); `build` loads it."""

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
    """Teacher's model, loaded in an engine; implements `OpenTeacher`."""

    engine: Engine
    asked: TeacherTokens
    micro_batch_size: int
    context: StageContext
    watchdog: Watchdog

    def of_rows(self, dataset: PackedDataset, rows: Sequence[int]) -> Iterator[NDArray[np.void]]:
        """Yield the teacher's likeliest tokens, computed in rounds of one micro-batch on each data-parallel process."""
        engine, starts = self.engine, _starts(dataset, rows)
        size = self.micro_batch_size * engine.data_parallel_size
        shares = list(even_micro_batches(len(rows), self.micro_batch_size, engine.data_rank, engine.data_parallel_size))
        for index, share in enumerate(shares):
            self.watchdog.begins(f"micro-batch {index + 1} of {len(shares)} of the teacher")
            own = self._of_batch(dataset.batch([rows[position] for position in share], self.micro_batch_size))
            first, last = starts[index * size], starts[min((index + 1) * size, len(rows))]
            # Every process fills in the targets of its own rows, so the sum over processes is the whole round.
            # float64 holds token numbers exactly, so they travel in the same collective as the log-probabilities.
            of_round = torch.zeros(int(last - first), 2, self.asked.number, dtype=torch.float64)
            if share:
                of_round[int(starts[share[0]] - first) : int(starts[share[-1] + 1] - first)] = own
            yield _recorded(engine.sum_over_data(of_round))
            self.context.progress(index + 1, len(shares), "micro-batches", "the teacher's likeliest tokens")

    def of_share(self, share_of: ShareOf, data_rank: int, num_shares: int) -> list[NDArray[np.void]]:
        return [_recorded(self._of_batch(batch)) for batch in share_of(data_rank)]

    def _of_batch(self, batch: Batch) -> torch.Tensor:
        """Return the teacher's likeliest tokens and their log-probabilities, float64 [targets, 2, number]."""
        answer = self.engine.likeliest_tokens(batch.with_signal(temperature=self.asked.temperature), self.asked.number)
        return torch.stack([values[batch.signal.has_target].double() for values in answer], 1)


def _recorded(values: torch.Tensor) -> NDArray[np.void]:
    """Convert a teacher's tokens and log-probabilities, [targets, 2, number], to the stored dtype, [targets]."""
    records = np.zeros(len(values), record_dtype(values.shape[-1]))
    records["tokens"], records["log_probabilities"] = values.unbind(1)
    return records


def _teacher(
    config: TrainConfig, context: StageContext, model: ModelFacts | None, start_digest: str, build: BuildEngine
) -> Teacher:
    asked = config.teacher_tokens
    assert asked
    if asked.server:
        return ServedTeacher.of(asked, config.execution)
    assert model
    # The teacher is a whole model: the adapter is of the one that learns.
    alone = config.model_copy(update={"adapter": None, "base": None})
    check_model(alone, context, model)
    digest = model_digest(model.folder)
    if digest == start_digest:
        context.warn(f"the teacher, {config.teacher}, is the model that training starts from: there is little to learn")
    size = config.layout.micro_batch_size
    return TeacherModel(digest, asked, config.precision, size, lambda: build(alone, model))


def _path(teacher: Teacher, asked: TeacherTokens, dataset: PackedDataset, rows: Sequence[int], cache: Path) -> Path:
    identity: dict[str, JsonValue] = {
        **teacher.identity,
        "data": dataset.key,
        "rows": hashlib.sha256(np.array(rows, dtype=np.int64).tobytes()).hexdigest(),
        "number": asked.number,
    }
    return cache / "teacher" / f"{content_key(identity)}.npy"


def _write(teacher: OpenTeacher, number: int, dataset: PackedDataset, rows: Sequence[int], path: Path) -> None:
    """Write the teacher's likeliest tokens to `path` as they arrive, on rank 0; the other processes wait."""
    array = _new_file(path, number, int(_starts(dataset, rows)[-1])) if is_main_process() else None
    first = 0
    for piece in teacher.of_rows(dataset, rows):
        if array is not None:
            array[first : first + len(piece)] = piece
            first += len(piece)
    if array is not None:
        assert first == len(array), "a record for every target"
        array.flush()
        # After a crash before the seal the file counts as missing, and the teacher is asked again.
        _unfinished(path).replace(path)
        write_seal(path)
    gathered(0.0)  # the others read what the first process has written


def _new_file(path: Path, number: int, num_targets: int) -> np.memmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = record_dtype(number)
    check_free_disk(path.parent, num_targets * record.itemsize, "teacher's likeliest tokens (distill.loss_top_k)")
    return np.lib.format.open_memmap(_unfinished(path), mode="w+", dtype=record, shape=(num_targets,))


def _starts(dataset: PackedDataset, rows: Sequence[int]) -> NDArray[np.int64]:
    # targets of the rows [3, 2] -> [0, 3, 5]
    return np.concatenate([[0], dataset.num_row_targets(rows).cumsum()])


def _unfinished(path: Path) -> Path:
    # with the process's number: two runs may fill the same cache entry at the same time
    return path.with_name(f".{path.name}.{os.getpid()}.npy")


def _too_many(asked: TeacherTokens, vocabulary: int | None) -> RecipeError | None:
    if vocabulary is None or asked.number <= vocabulary:
        return None
    return RecipeError(
        f"`loss_top_k` asks for {asked.number} tokens of the teacher, whose vocabulary has {vocabulary}; lower it"
    )


def _different_tokens(teacher: dict[str, int], model: dict[str, int]) -> list[str]:
    different = [token for token in {**teacher, **model} if teacher.get(token) != model.get(token)]
    return [f"{token!r} is {teacher.get(token)} and {model.get(token)}" for token in sorted(different)]
