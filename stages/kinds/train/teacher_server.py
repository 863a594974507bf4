"""What a teacher that is served says: asked over HTTP by rank 0, document by document, many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue

from stages.core.contract import StageContext, is_main_process
from stages.core.errors import ModelError, ServerError, TransientError
from stages.core.keys import key_in
from stages.core.redaction import redact, shortened
from stages.data.batch import Batch
from stages.data.dataset import PackedDataset
from stages.kinds.train.execution import TrainExecution
from stages.kinds.train.methods.method import TeacherServer, TeacherTokens
from stages.kinds.train.teacher_rows import OpenTeacher, ShareOf, said_record
from stages.kinds.train.watchdog import Watchdog
from stages.parallel.processes import gathered
from stages.serving.client import Client, token_number

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
    """See `stages.kinds.train.teacher_rows.OpenTeacher`. Both raise what `likeliest` raises."""

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
