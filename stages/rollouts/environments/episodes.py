"""Episodes: turns of the model and answers of an environment, as segments of token ids with who wrote them.

Token in, token out: what the model sampled is never decoded and tokenized again. It is decoded to find its calls, but
the next turn is asked for with the sampled ids themselves, followed by what the template writes between.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol, Self, TypeVar

from stages.core.errors import DataError
from stages.data.messages import Conversation, Message, RowError, make_message
from stages.data.tokenizer import DocumentTokenizer
from stages.rollouts.environments.calls import Parse, action, parser_for
from stages.rollouts.environments.continuation import Continuation, prove
from stages.rollouts.environments.environment import Action, Environment, EnvironmentConfig, MakeEnvironment, Step

End = Literal["done", "turns", "tokens", "seconds", "template", "failed"]
"""Reason for the end of an episode: the environment says so, one of the bounds, messages that no template shows, or a
failure of the environment, after which no reward is known."""
CUT = " … (cut off)"
Result = TypeVar("Result")


class SampledTurn(Protocol):
    """Turn that the model sampled (protocol). log_probabilities: the server's, in nats. truncated: cut off."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def log_probabilities(self) -> list[float]: ...
    @property
    def text(self) -> str: ...
    @property
    def truncated(self) -> bool: ...


@dataclass(frozen=True)
class TurnRequest:
    """Request for a turn: token ids up to it, the seed, and the largest number of tokens."""

    token_ids: list[int]
    seed: int
    max_tokens: int


Playing = Generator[list["TurnRequest"], Sequence[SampledTurn], list["Episode"]]
"""Playing of episodes, turn by turn: requests for turns go out, what was sampled comes in, episodes are returned."""
Sample = Callable[[Sequence[TurnRequest]], Sequence[SampledTurn]]
"""Function that asks a server for turns, one for each request, in their order."""


@dataclass(frozen=True)
class Segment:
    """Part of an episode after its prompt, as token ids. log_probabilities: of the model's tokens, in nats."""

    author: Literal["model", "environment"]
    token_ids: list[int]
    log_probabilities: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class EpisodeStart:
    """Beginning of an episode: its rendered prompt, the dataset row, and the seed of its turns and its environment.

    environment: name of that of several in which it is played, else "".
    """

    prompt: Conversation
    token_ids: list[int]
    row: Mapping[str, Any]
    seed: int
    environment: str = ""


@dataclass(frozen=True)
class TurnReader:
    """Reader of the model's turns. parse: reader of calls; None without tools. ends: tokens that end a turn."""

    tokenizer: DocumentTokenizer
    parse: Parse | None
    ends: Collection[int]

    @classmethod
    def proved(
        cls, tokenizer: DocumentTokenizer, ends: Collection[int], config: EnvironmentConfig, example: Conversation
    ) -> Self:
        """Return the reader of the turns that a model's chat template writes; raise DataError for one that is unfit.

        example: a prompt. The template must show calls in a known format, and continue conversations by appending.
        """
        template = tokenizer.template
        is_special = frozenset(tokenizer.special_tokens)
        parse = parser_for(template.source, is_special, template.name, example.tools) if example.tools else None
        for role in config.writes:
            prove(tokenizer, example, role, ends)
        return cls(tokenizer, parse, ends)

    def with_tools(self, prompt: Conversation) -> Self:
        """Return the reader of turns that answer a prompt with tools of its own; raise as `proved` does."""
        template = self.tokenizer.template
        parse = parser_for(template.source, frozenset(self.tokenizer.special_tokens), template.name, prompt.tools)
        prove(self.tokenizer, replace(prompt, messages=[make_message("user", "a question")]), "tool", self.ends)
        return replace(self, parse=parse)

    def read(self, turn: SampledTurn) -> Action | None:
        """Return what the model did in a turn; None for one that was cut off."""
        if turn.truncated or not turn.token_ids or turn.token_ids[-1] not in self.ends:
            return None
        return action(self.tokenizer.decode(turn.token_ids[:-1]), self.parse)


@dataclass
class Episode:
    """Episode that is under way or over. text: the model's last answer, without special tokens."""

    start: EpisodeStart
    config: EnvironmentConfig
    environment: Environment
    continuation: Continuation
    began_s: float
    reader: TurnReader
    segments: list[Segment] = field(default_factory=list)
    text: str = ""
    reward: float = 0.0
    end: End | None = None
    failure: str | None = None
    """Reason why the environment failed, if it did."""
    num_calls: int = 0
    num_malformed: int = 0
    num_failed: int = 0
    num_cut: int = 0
    cut: Action | None = None
    """Last turn of the model, where it was cut off."""
    turns: list[Action] = field(default_factory=list)
    """Actions of the model, turn by turn, without that of a turn that was cut off."""
    answers: list[tuple[Message, ...]] = field(default_factory=list)
    """Messages of the environment after each of them that has some."""

    @property
    def messages(self) -> list[Message]:
        """Messages after the prompt, as rows of a dataset have them."""
        messages: list[Message] = []
        for number, turn in enumerate(self.turns):
            messages.append(turn.message)
            messages += self.answers[number] if number < len(self.answers) else ()
        return messages

    @property
    def num_turns(self) -> int:
        return sum(segment.author == "model" for segment in self.segments)

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the prompt and of all segments."""
        return [*self.start.token_ids, *self.after_prompt]

    @property
    def after_prompt(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def log_probabilities(self) -> list[float]:
        """Log-probabilities of the tokens after the prompt, in nats; 0 for those that the environment wrote."""
        given = (one.log_probabilities or [0.0] * len(one.token_ids) for one in self.segments)
        return [value for values in given for value in values]

    @property
    def environment_spans(self) -> list[tuple[int, int]]:
        """Places of what the environment wrote among the tokens after the prompt."""
        spans, begin = [], 0
        for segment in self.segments:
            end = begin + len(segment.token_ids)
            spans += [(begin, end)] if segment.author == "environment" else []
            begin = end
        return spans

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of an episode, whose means are a round's metrics."""
        ends = {f"out_of_{name}": float(self.end == name) for name in ("turns", "tokens", "seconds")}
        return {
            "turns": float(self.num_turns),
            "calls": float(self.num_calls),
            "malformed_calls": float(self.num_malformed),
            "failed_calls": float(self.num_failed),
            "cut_answers": float(self.num_cut),
            **ends,
            **self.environment.metrics,
        }


@dataclass(frozen=True)
class Episodes:
    """Player of episodes, all of them turn by turn.

    most_tokens: of an episode with its prompt. turn_tokens: of a turn. turn_seed: function of an episode's seed and the
    turn's number.
    """

    config: EnvironmentConfig
    make: MakeEnvironment
    reader: TurnReader
    most_tokens: int
    turn_tokens: int
    turn_seed: Callable[[int, int], int]

    def play(self, starts: Sequence[EpisodeStart], sample: Sample) -> list[Episode]:
        """Play an episode from each start, to its end, and return them in order.

        Raises DataError for an environment that fails and a template that cannot be continued, and as `sample` does.
        """
        return play_together({"": self}, starts, sample)

    def turns(self, starts: Sequence[EpisodeStart]) -> Playing:
        """Yield the requests for the next turns, take the turns, and return the episodes; raise as `play` does."""
        waiting, episodes = deque(starts), list[Episode]()
        most = self.config.most_together or max(1, len(starts))
        pool = ThreadPoolExecutor(self.config.num_threads)
        try:
            while True:
                playing = [episode for episode in episodes if episode.end is None]
                new = [waiting.popleft() for _ in range(min(len(waiting), most - len(playing)))]
                began_s, environments = time.monotonic(), [self.make() for _ in new]
                resets = [
                    partial(one.reset, start.row, start.seed) for one, start in zip(environments, new, strict=True)
                ]
                shown = _all_of(pool, resets)
                # not in the pool: one thread renders and tokenizes
                begun = [self._begun(*one, began_s) for one in zip(new, environments, shown, strict=True)]
                episodes += begun
                playing += begun
                if not playing:
                    break
                turns = yield [self._request(episode) for episode in playing]
                acting = [
                    (episode, acted)
                    for episode, turn in zip(playing, turns, strict=True)
                    if (acted := self._acted(episode, turn))
                ]
                steps = _all_of(pool, [partial(episode.environment.step, acted) for episode, acted in acting])
                for (episode, acted), step in zip(acting, steps, strict=True):
                    self._go_on(episode, acted, step)
                _all_of(pool, [partial(self._close, episode) for episode in playing if episode.end])
        finally:
            # after an error others may still act: they end when the environment is closed
            pool.shutdown(wait=False, cancel_futures=True)
        return episodes

    def _begun(
        self, start: EpisodeStart, environment: Environment, shown: str | Conversation | None, began_s: float
    ) -> Episode:
        reader = self.reader
        if isinstance(shown, Conversation):
            reader = reader.with_tools(shown) if shown.tools else reader
            start = self._asking(start, shown)
        elif shown:
            start = self._with_observation(start, shown)
        continuation = Continuation(self.reader.tokenizer, start.prompt, start.token_ids)
        return Episode(start, self.config, environment, continuation, began_s, reader)

    def _close(self, episode: Episode) -> None:
        """Free what an episode that is over holds, after its environment has rewarded one that a bound has ended."""
        if episode.end not in ("done", "failed"):
            episode.reward += episode.environment.cut_short(episode.cut)
        episode.environment.close()

    def _with_observation(self, start: EpisodeStart, text: str) -> EpisodeStart:
        """Return a beginning whose question ends with what the environment shows first; DataError without room."""
        *before, question = start.prompt.messages
        observation = _bounded(make_message(question["role"], text), self.config.max_answer_bytes)["content"]
        shown = make_message(question["role"], f"{question['content']}\n\n{observation}")
        return self._asking(start, replace(start.prompt, messages=[*before, shown]))

    def _asking(self, start: EpisodeStart, prompt: Conversation) -> EpisodeStart:
        """Return a beginning with another prompt, rendered. Raises DataError without room, or if no template can."""
        try:
            _, token_ids = self.reader.tokenizer.encode_prompt(prompt)
        except RowError as error:
            raise DataError(f"{self.reader.tokenizer.template.name} cannot begin an episode: it {error}") from error
        if len(token_ids) + self.turn_tokens > self.most_tokens:
            raise DataError(
                f"an episode begins with {len(token_ids)} tokens, which leave less than a turn's {self.turn_tokens} of "
                f"the {self.most_tokens} that prompt and completion may have; raise them, or show less at first"
            )
        return replace(start, prompt=prompt, token_ids=token_ids)

    def _request(self, episode: Episode) -> TurnRequest:
        token_ids = episode.token_ids
        room = min(self.turn_tokens, self.most_tokens - len(token_ids))
        return TurnRequest(token_ids, self.turn_seed(episode.start.seed, episode.num_turns), room)

    def _acted(self, episode: Episode, turn: SampledTurn) -> Action | None:
        """Append the model's turn to an episode, and return what the model did; None ends the episode."""
        num_tokens = len(episode.token_ids), len(turn.token_ids)
        episode.segments.append(Segment("model", turn.token_ids, turn.log_probabilities))
        episode.text = turn.text
        acted = episode.reader.read(turn)
        if acted is None:
            text = episode.reader.tokenizer.decode(turn.token_ids)
            episode.end, episode.cut = "tokens", Action(text, num_tokens=num_tokens)
            return None
        return replace(acted, num_tokens=num_tokens)

    def _go_on(self, episode: Episode, acted: Action, step: Step) -> None:
        """Append the environment's answer to an episode, and end it at a bound."""
        episode.turns.append(acted)
        episode.reward += step.reward
        episode.num_calls += len(acted.calls)
        episode.num_malformed += acted.malformed is not None
        episode.num_failed += step.num_failed
        if step.failure:
            episode.end, episode.failure = "failed", step.failure
        elif step.done:
            episode.end = "done"
        elif episode.num_turns >= self.config.max_turns:
            episode.end = "turns"
        elif time.monotonic() - episode.began_s >= self.config.max_episode_s:
            episode.end = "seconds"
        else:
            self._answer(episode, step.messages)

    def _answer(self, episode: Episode, messages: Sequence[Message]) -> None:
        """Append the environment's messages, unless they leave no room for a token of the model."""
        cut: list[Message] = []
        left = self.config.max_answer_bytes  # of the whole turn
        for message in messages:
            cut.append(_bounded(message, left))
            left = max(0, left - len(str(message["content"]).encode("utf-8", "replace")))
        episode.num_cut += cut != list(messages)
        try:
            between = episode.continuation.append(cut, self.reader.ends)
        except RowError as error:  # such as that of Llama 3: one call in a turn
            episode.num_malformed += 1
            if self.config.IS_EXACT:
                episode.end = "template"
                return
            between = self._told(episode, cut[0]["role"], str(error))
        if len(episode.token_ids) + len(between) >= self.most_tokens:
            episode.end = "tokens"
        else:
            episode.segments.append(Segment("environment", between))
            episode.answers.append(tuple(cut))

    def _told(self, episode: Episode, role: str, problem: str) -> list[int]:
        """Return the tokens of one message that says why the template cannot show the answers to a turn."""
        text = f"error: the chat template {problem}; nothing was answered"
        message = _bounded(make_message(role, text), self.config.max_answer_bytes)
        try:
            return episode.continuation.append([message], self.reader.ends)
        except RowError as error:
            raise DataError(f"{self.reader.tokenizer.template.name} cannot continue an episode: it {error}") from error


def play_together(players: Mapping[str, Episodes], starts: Sequence[EpisodeStart], sample: Sample) -> list[Episode]:
    """Play episodes of several environments, whose turns are sampled together, and return them in order.

    players: by the environment's name. Raises as `Episodes.play` does.
    """
    with ExitStack() as stack:
        playing = {}
        for name, player in players.items():
            own = player.turns([start for start in starts if start.environment == name])
            playing[name] = stack.enter_context(closing(own))
        ended: dict[str, Iterator[Episode]] = {}
        turns: dict[str, Sequence[SampledTurn]] = {}
        while len(ended) < len(players):
            asked: dict[str, list[TurnRequest]] = {}
            for name in (name for name in players if name not in ended):
                try:
                    asked[name] = playing[name].send(turns[name]) if turns else next(playing[name])
                except StopIteration as over:
                    ended[name] = iter(over.value)
            sampled = iter(sample([request for requests in asked.values() for request in requests]) if asked else ())
            turns = {name: [*islice(sampled, len(requests))] for name, requests in asked.items()}
    return [next(ended[start.environment]) for start in starts]


def _all_of(pool: ThreadPoolExecutor, tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run tasks in a pool, and return their results in order; raise the first error, whatever else still runs."""
    futures = [pool.submit(task) for task in tasks]
    for ended in wait(futures, return_when=FIRST_EXCEPTION).done:
        ended.result()
    return [future.result() for future in futures]


def _bounded(message: Message, most_bytes: int) -> Message:
    """Return a message whose text has at most this many bytes, with a note where it was cut off."""
    content = str(message["content"]).encode("utf-8", "replace")
    if len(content) <= most_bytes:
        return {**message, "content": content.decode()}
    return {**message, "content": content[:most_bytes].decode(errors="ignore") + CUT}
