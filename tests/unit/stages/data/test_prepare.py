"""Preparation from dataset folder to packed rows: no row is lost, repeated or ignored silently."""

import json

import pytest

from stages.core.errors import DataError, ModelError
from stages.data.batch import IGNORED
from stages.data.config import DataConfig
from stages.data.prepare import prepare
from stages.hubs.builtin import addition, addition_preferences, qwen3
from stages.models.facts import ModelFacts
from tests.unit.stages.data.conftest import CHATML
from tests.unit.stages.data.reports import Reports


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def pair(question, chosen, rejected):
    return {"prompt": question, "chosen": chosen, "rejected": rejected}


CHATS = [chat(f"question {number}", f"answer {number}") for number in range(30)]


@pytest.fixture
def run(tmp_path, tokenizer_folder):
    """Provide a function that prepares a dataset folder; its attributes hold the reports and the file of bad rows."""

    def prepare_folder(folder, rows="examples", tokenizer=tokenizer_folder, **options):
        return prepare(
            folder,
            DataConfig(dataset="data", **{"sequence_length": 256, **options}),
            ModelFacts(tokenizer),
            rows=rows,
            cache=tmp_path / "cache",
            report=prepare_folder.reports,
            bad_rows_file=prepare_folder.bad_rows_file,
        )

    prepare_folder.reports = Reports()
    prepare_folder.bad_rows_file = tmp_path / "bad_rows.jsonl"
    return prepare_folder


def documents(dataset, read_ids):
    """Return the text of every document in a dataset, and the part of it that has a loss."""
    batch = dataset.batch(range(len(dataset)))
    found = []
    for number in range(batch.documents.count):
        mine = batch.documents.ids == number
        targets = batch.signal.targets[mine]
        found.append((read_ids(batch.inputs.input_ids[mine].tolist()), read_ids(targets[targets != IGNORED].tolist())))
    return found


TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("rows", "train_on"), [("examples", "assistant"), ("examples", "all"), ("pairs", "assistant")])
def test_a_prompt_with_tools_is_kept_as_it_is_learned_for_servers_to_compare(
    run, write_rows, make_tokenizer, read_ids, rows, train_on
):
    tools, tokenizer = {"tools": [{"name": "f"}]}, make_tokenizer(TOOLS)
    asked = [*chat("q1", "a1")["messages"], {"role": "user", "content": "q2"}]
    good, bad = ([{"role": "assistant", "content": text}] for text in ("a2", "no"))
    special = {**chat("<|im_end|>", "a"), **tools}  # a server would take it for the token
    folder = write_rows(
        [pair([asked[0]], good, bad), {**pair(asked, good, bad), **tools}]
        if rows == "pairs"
        else [chat("q", "a"), special, {"messages": asked + good, **tools}]
    )
    training = run(folder, rows, tokenizer, train_on=train_on, sequence_length=1024).training
    (prompt,) = training.about.tool_prompts
    function = {"name": "f", "description": None, "parameters": None}
    assert (prompt.messages, prompt.tools) == (asked, [{"type": "function", "function": function}])
    text = read_ids(prompt.token_ids)
    assert text.startswith('{"type": "function"') and text.endswith("q2<|im_end|>\n<|im_start|>assistant\n")
    learned = [tokens.tolist() for row in range(len(training)) for tokens, _ in training.documents(row)]
    assert any(tokens[: len(prompt.token_ids)] == prompt.token_ids for tokens in learned)
    again = run(folder, rows, tokenizer, train_on=train_on, sequence_length=1024, packing=False).training
    assert again.about.tool_prompts == (prompt,)


@pytest.mark.parametrize("packing", [True, False])
def test_every_row_becomes_one_document_with_its_answer_to_learn(run, write_rows, read_ids, packing):
    data = run(write_rows(CHATS), packing=packing)
    assert sorted(documents(data.training, read_ids)) == sorted(
        (
            f"<|im_start|>user\nquestion {number}<|im_end|>\n<|im_start|>assistant\nanswer {number}<|im_end|>\n",
            f"answer {number}<|im_end|>",
        )
        for number in range(30)
    )
    assert data.evaluation is None
    assert not run.reports.warnings
    assert not run.bad_rows_file.exists()


def test_pairs_stay_together_chosen_first(run, write_rows, read_ids):
    rows = [pair(f"q{number} ", f"good {number}", f"bad {number}") for number in range(30)]
    data = run(write_rows(rows), rows="pairs")
    found = documents(data.training, read_ids)
    assert len(found) == 60
    for (chosen, _), (rejected, learned) in zip(found[::2], found[1::2], strict=True):
        number = chosen.removesuffix("</s>").split()[-1]
        assert chosen == f"q{number} good {number}</s>"
        assert (rejected, learned) == (f"q{number} bad {number}</s>", f"bad {number}</s>")
    batch = data.training.batch([0])
    assert batch.documents.count % 2 == 0


def test_the_quickstarts_problems_leave_less_than_one_percent_padding(run, tmp_path):
    for name in ("data", "model"):
        (tmp_path / name).mkdir()
    addition.make(tmp_path / "data")
    qwen3.make_tokenizer().save_pretrained(tmp_path / "model")
    data = run(tmp_path / "data", tokenizer=tmp_path / "model", evaluation_split="validation")
    assert data.training.padding_fraction <= 0.01
    assert data.training.num_documents == 9200
    assert data.evaluation.num_documents == 300
    assert not run.reports.warnings


def test_the_quickstarts_preferences_are_learned_from_the_answer_on(run, tmp_path):
    for name in ("data", "model"):
        (tmp_path / name).mkdir()
    addition_preferences.make(tmp_path / "data")
    tokenizer = qwen3.make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    data = run(tmp_path / "data", "pairs", tmp_path / "model", split="validation")
    batch = data.training.batch([0])
    learned = [batch.signal.targets[batch.documents.ids == number] for number in range(batch.documents.count)]
    answers = [tokenizer.decode(targets[targets != IGNORED]).removesuffix("<|im_end|>") for targets in learned]
    rows = map(json.loads, (tmp_path / "data" / "validation.jsonl").read_text().splitlines())
    assert not run.reports.warnings
    expected = {(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows}
    assert set(zip(answers[::2], answers[1::2], strict=True)) <= expected


def test_preparing_again_finds_the_same_and_reads_nothing(run, write_rows):
    folder = write_rows(CHATS)
    first = run(folder, over_long="truncate", sequence_length=40)
    num_reports = len(run.reports.done)
    second = run(folder, over_long="truncate", sequence_length=40)
    assert first.training.folder == second.training.folder
    assert len(run.reports.done) == num_reports
    assert len(run.reports.warnings) == 2
    assert run.reports.warnings[0] == run.reports.warnings[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence_length": 128},
        {"packing": False},
        {"train_on": "all"},
        {"turns": "separately"},
        {"template_date": "2025-03-09"},
        {"over_long": "drop"},
        {"on_bad_rows": "drop"},
        {"evaluation_fraction": 0.5},
    ],
)
def test_other_options_are_another_entry(run, write_rows, changes):
    folder = write_rows(CHATS)
    assert run(folder).training.key != run(folder, **changes).training.key


def test_other_rows_another_tokenizer_and_another_template_are_another_entry(run, write_rows, make_tokenizer, tmp_path):
    template = tmp_path / "labels.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] + '<|eot|>' }}{% endfor %}")
    first = run(write_rows(CHATS))
    merged = run(write_rows(CHATS), tokenizer=make_tokenizer(merges=[("a", "n")]))
    templated = run(write_rows(CHATS), chat_template=template)
    changed = run(write_rows(CHATS[1:]))
    assert len({data.training.key for data in (first, merged, templated, changed)}) == 4
    assert templated.training.num_tokens < first.training.num_tokens


BAD = [CHATS[0], {"messages": []}, "text", chat("a", ""), CHATS[1]]


def test_bad_rows_fail_with_every_place_and_reason(run, write_rows):
    with pytest.raises(DataError) as raised:
        run(write_rows(BAD))
    assert str(raised.value) == (
        "3 of 5 rows cannot be learned from:\n"
        "  train.jsonl:2 has an empty list in `messages`; expected messages\n"
        "  train.jsonl:3 is a string; expected an object with named columns\n"
        "  train.jsonl:4 has an empty `content` in message 2 of `messages`; expected text\n"
        "Fix these rows, or set `on_bad_rows: drop` and `max_bad_row_fraction: 0.6` to skip them."
    )


def test_ten_bad_rows_are_named_and_the_others_counted(run, write_rows):
    with pytest.raises(DataError, match=r"25 of 26 rows(.*\n){11}  … and 15 more\n"):
        run(write_rows([CHATS[0], *[{"messages": []}] * 25]))


def test_dropped_rows_are_listed_and_warned_of(run, write_rows, read_ids):
    data = run(write_rows(BAD), on_bad_rows="drop", max_bad_row_fraction=0.6)
    assert data.training.num_documents == 2
    assert run.reports.warnings == [
        "training data: 3 of 5 rows cannot be learned from and were dropped: train.jsonl:2 has an empty list in "
        "`messages`; expected messages"
    ]
    listed = [json.loads(line) for line in run.bad_rows_file.read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in listed] == [("train.jsonl", line) for line in (2, 3, 4)]
    assert all(row["reason"] for row in listed)


def test_more_dropped_rows_than_allowed_are_an_error(run, write_rows):
    with pytest.raises(DataError, match=r"3 of 5 rows .* more than max_bad_row_fraction 0\.5"):
        run(write_rows(BAD), on_bad_rows="drop", max_bad_row_fraction=0.5)


def test_a_failure_leaves_no_cache_entry(run, write_rows, tmp_path):
    with pytest.raises(DataError):
        run(write_rows(BAD))
    assert [path.suffix for path in (tmp_path / "cache" / "tokenized").iterdir()] == [".lock"]


def test_a_malformed_line_is_named_with_its_column(run, write_rows):
    folder = write_rows(CHATS)
    with (folder / "train.jsonl").open("a") as stream:
        stream.write('{"messages": [}\n')
    with pytest.raises(DataError, match=r"train.jsonl:31 is not valid JSON: Expecting value at column 15"):
        run(folder)


def test_over_long_rows_are_never_cut_silently(run, write_rows):
    rows = [*CHATS, chat("a", "very long " * 100)]
    folder = write_rows(rows)
    with pytest.raises(DataError, match=r"1 of 31 rows have more than sequence_length 256 .* train.jsonl:31 \("):
        run(folder)
    assert run(folder, over_long="drop").training.num_documents == 30
    assert run(folder, over_long="truncate").training.num_documents == 31
    assert ["left out" in run.reports.warnings[0], "cut off" in run.reports.warnings[1]] == [True, True]


def test_every_row_over_long_is_an_error_under_drop(run, write_rows):
    with pytest.raises(DataError, match=r"30 of 30 rows have more than sequence_length 16 .* nothing to learn from"):
        run(write_rows(CHATS), over_long="drop", sequence_length=16)


def test_an_answer_beyond_the_truncation_is_a_bad_row(run, write_rows):
    with pytest.raises(DataError, match=r"1 of 31 rows .*\n  train.jsonl:31 has nothing to learn from in the part"):
        run(write_rows([*CHATS, chat("long " * 100, "a")]), over_long="truncate")


def test_an_empty_file_is_an_error(run, write_rows):
    with pytest.raises(DataError, match=r"no training rows: there are none in train.jsonl"):
        run(write_rows([]))


def test_a_held_out_fraction_that_is_empty_is_an_error(run, write_rows):
    with pytest.raises(DataError, match=r"no evaluation rows: evaluation_fraction 1e-09 leaves none"):
        run(write_rows(CHATS), evaluation_fraction=1e-9)


def test_a_held_out_fraction_is_not_trained_on(run, write_rows, read_ids):
    data = run(write_rows(CHATS), evaluation_fraction=0.3)
    trained, held_out = (set(documents(part, read_ids)) for part in (data.training, data.evaluation))
    assert len(trained) + len(held_out) == 30
    assert not trained & held_out


def test_a_template_without_an_end_of_turn_is_warned_of(run, write_rows, make_tokenizer):
    labels = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    run(write_rows(CHATS), tokenizer=make_tokenizer(labels), train_on="all")
    assert "will not learn to stop" in run.reports.warnings[0]


def test_a_missing_template_file_is_an_error_that_names_it(run, write_rows, tmp_path):
    with pytest.raises(DataError, match=r"there is no chat template .*missing\.jinja"):
        run(write_rows(CHATS), chat_template=tmp_path / "missing.jinja")


def test_a_model_folder_without_a_tokenizer_is_an_error(run, write_rows, tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError, match=r"the tokenizer in .*model cannot be loaded"):
        run(write_rows(CHATS), tokenizer=tmp_path / "model")


LAST_ENDS_OTHERWISE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{{ '</s>' if loop.last and not add_generation_prompt else '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def turns(number):
    return {
        "messages": chat(f"ask{number}", f"say{number}")["messages"] + chat(f"and{number}", f"more{number}")["messages"]
    }


def test_a_conversation_may_become_several_documents(run, write_rows, make_tokenizer, read_ids):
    data = run(write_rows([turns(number) for number in range(9)]), tokenizer=make_tokenizer(LAST_ENDS_OTHERWISE))
    assert sorted(text for _, text in documents(data.training, read_ids)) == sorted(
        f"{word}{number}</s>" for number in range(9) for word in ("say", "more")
    )


def test_an_over_long_conversation_counts_once_and_keeps_what_fits(run, write_rows, make_tokenizer, read_ids):
    tokenizer = make_tokenizer(LAST_ENDS_OTHERWISE)
    options = {"tokenizer": tokenizer, "over_long": "drop", "sequence_length": 40}
    data = run(write_rows([turns(number) for number in range(9)]), **options)
    assert {text[:3] for _, text in documents(data.training, read_ids)} == {"say"}
    assert "9 of 9 rows have more than sequence_length 40" in run.reports.warnings[0]


def test_the_date_is_part_of_the_entry_and_the_default_one_is_warned_of(run, write_rows, make_tokenizer, read_ids):
    dated = "{{ strftime_now('%d %b %Y') }}{% for message in messages %}{{ message.content + '<|eot|>' }}{% endfor %}"
    folder, tokenizer = write_rows(CHATS), make_tokenizer(dated)
    first = run(folder, tokenizer=tokenizer)
    assert all(text.startswith("01 Jan 2026") for text, _ in documents(first.training, read_ids))
    assert "writes the current date, for which 2026-01-01 stands" in run.reports.warnings[0]
    second = run(folder, tokenizer=tokenizer, template_date="2025-03-09")
    assert all(text.startswith("09 Mar 2025") for text, _ in documents(second.training, read_ids))
    assert len(run.reports.warnings) == 1


def test_another_config_of_the_model_is_another_entry(run, write_rows, make_tokenizer):
    folder, tokenizer = write_rows(CHATS), make_tokenizer()
    first = run(folder, tokenizer=tokenizer).training.key
    (tokenizer / "config.json").write_text('{"model_type": "llama"}')
    assert run(folder, tokenizer=tokenizer).training.key != first


@pytest.mark.parametrize("bad", [2, 100])
def test_the_row_that_a_template_does_not_end_with_is_named(run, write_rows, make_tokenizer, monkeypatch, bad):
    monkeypatch.setattr("stages.data.templates.MAX_CPU_SECONDS", 0.2)
    endless = (
        "{% if messages[0].content == 'ask bad' %}"
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    )
    rows = [chat("ask bad" if number == bad else f"ask{number}", f"say{number}") for number in range(1, 130)]
    with pytest.raises(DataError, match=rf"train\.jsonl:{bad}: the model's chat template does not end"):
        run(write_rows(rows), tokenizer=make_tokenizer(endless + CHATML))
