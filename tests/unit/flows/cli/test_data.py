"""`lifecycle data` shows rows as the model sees them in a terminal, a pipe and a browser, safely escaped."""

import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from flows.cli import data_views
from flows.cli.data_views import data_page, print_look, visible
from flows.cli.main import main
from stages.core.errors import RecipeError, StoreError
from stages.data.summaries import Bar, DataLook, DroppedRows, ShownDocument, ShownPortion, ShownRow, TokenSpan
from stages.hubs.builtin import qwen3
from tests.hub_server import running_hub

HOSTILE = (
    "</pre><script src=https://evil.example/x.js></script><img src=x onerror=alert(1)> \x1b[31m \u202e {{ 7 * 7 }}"
)
PIECES = (
    TokenSpan(text="Q: "),
    TokenSpan(text=HOSTILE, learned=True),
    TokenSpan(text="<|im_end|>", learned=True, special=True),
)
LOOK = DataLook(
    what="examples",
    portions=(
        ShownPortion(
            name="training",
            num_source_rows=1_205,
            num_rows=100,
            num_documents=1_200,
            num_tokens=10_000,
            num_target_tokens=2_500,
            sequence_length=128,
            padding_fraction=0.125,
            over_long="truncate",
            num_over_long=3,
            num_bad_rows=5,
            dropped=(DroppedRows(reason=HOSTILE, count=5, example="train.jsonl:7"),),
            lengths=(Bar(first=1, last=10, count=1_000), Bar(first=11, last=20, count=200)),
            warnings=(HOSTILE,),
        ),
    ),
    rows=(
        ShownRow(
            name="row 1 of 100",
            documents=(ShownDocument(name="", num_tokens=9, num_target_tokens=5, pieces=PIECES, num_hidden_tokens=2),),
            num_padding_tokens=4,
        ),
    ),
)
RECIPE = """
name: small
stages:
  base: {kind: download, model: "file://MODEL"}
  rows: {kind: download, dataset: file://rows.jsonl}
  far: {kind: download, dataset: "hf://datasets/org/rows"}
  sft:
    kind: train
    method: sft
    model: base
    data: {dataset: rows, sequence_length: 512, on_bad_rows: drop, max_bad_row_fraction: 0.5}
    global_batch_size: 2
    learning_rate: 1.0e-3
  later:
    kind: train
    method: sft
    model: sft
    data: {dataset: far, sequence_length: 64}
    global_batch_size: 2
    learning_rate: 1.0e-3
  texts: {kind: download, dataset: file://texts.jsonl}
  mixed:
    kind: train
    method: sft
    model: base
    data:
      datasets: [{dataset: rows, weight: 3}, {dataset: texts, weight: 1, format: text, evaluation_fraction: 0.25}]
      sequence_length: 512
      on_bad_rows: drop
      max_bad_row_fraction: 0.5
    steps: 30
    global_batch_size: 2
    learning_rate: 1.0e-3
  answers: {kind: generate, model: sft, prompts: {dataset: rows, limit: 3}}
"""


class Page(HTMLParser):
    """HTML parser that collects a page's tags with their attributes, and the text marked as trained on."""

    def __init__(self):
        super().__init__()
        self.tags, self.learned = [], []
        self._is_learned = False

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._is_learned = "learned" in dict(attrs).get("class", "")

    def handle_endtag(self, tag):
        self._is_learned = False

    def handle_data(self, data):
        if self._is_learned:
            self.learned.append(data)


def printed(monkeypatch, **options):
    stream = io.StringIO()
    monkeypatch.setattr(
        data_views, "Console", lambda **given: Console(width=200, **{**given, "file": stream}, **options)
    )
    print_look(LOOK)
    return stream.getvalue()


def test_without_a_terminal_marks_enclose_what_is_learned(monkeypatch):
    text = printed(monkeypatch)
    assert "1,205 rows read → 1,200 documents in 100 packed rows of 128 tokens (12.5% padding)" in text
    assert "10,000 tokens, 2,500 of them (25.0%) learned" in text
    assert "3 rows were cut off at 128 tokens" in text
    assert f"5 × {visible(HOSTILE)} (first: train.jsonl:7)" in text
    assert f"Q: ⟦{visible(HOSTILE)}<|im_end|>⟧" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_at_a_terminal_colours_do_unless_they_are_off(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = printed(monkeypatch, force_terminal=True, color_system="standard")
    assert "\x1b[32m" in coloured
    assert "⟦" not in coloured
    assert "\x1b[31m" not in coloured  # what the row itself says
    monkeypatch.setenv("NO_COLOR", "1")
    assert "⟦" in printed(monkeypatch, force_terminal=True, color_system="standard")


def test_the_page_shows_hostile_rows_as_text_and_needs_nothing_else():
    text = data_page(LOOK, f"Data of {HOSTILE}")
    page = Page()
    page.feed(text)
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "a"}
    assert not [name for _, attributes in page.tags for name in attributes if name in ("src", "href", "onerror")]
    assert "".join(page.learned[1:]) == visible(HOSTILE) + "<|im_end|>"  # the first one is in the legend
    assert "prefers-color-scheme: dark" in text
    assert "default-src 'none'" in text
    assert "\x1b" not in text
    assert "and 2 more tokens" in text


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Provide the folder of a builtin model, made once for all tests, since making one imports torch."""
    folder = tmp_path_factory.mktemp("model")
    qwen3.make(folder)
    return folder


@pytest.fixture
def lifecycle(capsys, tmp_path, model, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    (tmp_path / "small.yaml").write_text(RECIPE.replace("MODEL", str(model)))
    chat = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "fine"}]
    rows = [{"messages": chat}, {"messages": []}]
    texts = "".join(json.dumps({"text": f"{number} is a number."}) + "\n" for number in range(40))
    (tmp_path / "texts.jsonl").write_text(texts)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return ended.value.code, *capsys.readouterr()

    return run


def test_rows_of_a_local_file_are_shown_before_anything_was_run(lifecycle, tmp_path):
    code, output, errors = lifecycle("data", tmp_path / "small.yaml", "--stage", "sft")
    assert (code, errors) == (0, "")
    assert "training: 2 rows read → 1 document in 1 packed row of 512 tokens" in output
    assert "1 × has an empty list in `messages`; expected messages (first: rows.jsonl:2)" in output
    assert "⟦fine<|im_end|>⟧" in output
    page = tmp_path / "home" / "data" / "small-sft.html"
    assert f"as a page: {page}" in output
    assert "fine" in page.read_text()
    assert not [*(tmp_path / "home" / "store" / ".work" / "look").iterdir()]
    assert not (tmp_path / "home" / "ledger").exists()  # no refresh was begun


def test_of_a_mixture_each_part_has_its_rows_and_its_share(lifecycle, tmp_path):
    code, output, errors = lifecycle("data", tmp_path / "small.yaml", "--stage", "mixed", "--rows", "4")
    assert (code, errors) == (0, "")
    line = r"training of (\w+): (\d+) rows read .* in (\d+) packed .*; ([\d.]+)% of what is learned, ([\d.]+) epochs"
    (rows, texts) = re.findall(line, output)
    held_out = int(re.search(r"evaluation of texts: (\d+) rows read", output)[1])
    assert 0 < held_out < 40
    assert (rows[:2], texts[:2]) == (("rows", "2"), ("texts", str(40 - held_out)))
    assert [float(share) for *_, share, _ in (rows, texts)] == [pytest.approx(75, abs=3), pytest.approx(25, abs=3)]
    for _, _, num_packed, share, epochs in (rows, texts):
        assert float(epochs) == pytest.approx(30 * 2 * float(share) / 100 / int(num_packed), rel=0.01)
    assert "row 1 of 1 of rows" in output
    page = (tmp_path / "home" / "data" / "small-mixed.html").read_text()
    assert "training of texts" in page
    assert f"{texts[3]}% of what is learned, {texts[4]} epochs" in page


def test_what_is_elsewhere_is_fetched_when_asked_for_and_else_named_with_what_to_run(lifecycle, tmp_path, monkeypatch):
    recipe = tmp_path / "small.yaml"
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        hub.repository("datasets/org/rows").commit({"train.jsonl": b'{"prompt": "2 + 2 = ", "completion": "4"}\n' * 3})
        code, _, errors = lifecycle("data", recipe, "--stage", "later")
        assert code == StoreError.exit_code
        assert "it needs far (hf://datasets/org/rows), and it is not in the store" in errors
        assert f"add `--download`, or run `lifecycle run {recipe} --until far`" in errors
        code, output, _ = lifecycle("data", recipe, "--stage", "later", "--download", "--rows", "1")
    assert code == 0
    assert "2 + 2 = ⟦4" in output
    assert "2 of 3 rows repeat an earlier one" in output


def test_a_stage_without_data_is_named_with_those_that_have_some(lifecycle, tmp_path):
    code, output, _ = lifecycle("data", tmp_path / "small.yaml", "--stage", "base", "--json")
    assert code == RecipeError.exit_code
    assert "kind download has none to look at; expected sft, later, mixed, answers" in json.loads(output)["error"]
