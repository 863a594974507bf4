"""Only planted duplicates are found, exact and near ones; estimated Jaccard similarities agree with exact ones."""

import itertools
import random
import time

import pytest

from stages.kinds.curate.near_duplicates import NUM_HASHES, set_of, values_per_band
from stages.kinds.curate.words import words_of
from tests.planted_rows import near_duplicate, planted_duplicates, text
from tests.unit.stages.kinds.curate.curating import curate, lines

CHAT = [{"role": "user", "content": "What is 12 + 34?"}, {"role": "assistant", "content": "46"}]


def jaccard(one, other, num_words=3):
    """Return the exact Jaccard similarity of two texts, taken as sets of `num_words` consecutive words."""
    first, second = (
        {tuple(words[at : at + num_words]) for at in range(len(words) - num_words + 1)}
        for words in (one.split(), other.split())
    )
    return len(first & second) / len(first | second)


def test_of_2000_rows_planted_near_duplicates_are_found_and_nothing_else(tmp_path):
    planted = planted_duplicates(2000)
    found = curate(tmp_path, [{"text": one} for one in planted.texts], near_duplicates={})
    dropped = {row["line"] - 1 for row in found.dropped}
    right = len(dropped & planted.copies.keys())
    assert right / len(planted.copies) >= 0.95
    assert right / len(dropped) >= 0.95
    assert found.rows == [{"text": one} for number, one in enumerate(planted.texts) if number not in dropped]
    of = {row["line"] - 1: row["reason"] for row in found.dropped}
    assert all(
        f"mine train.jsonl:{planted.copies[number] + 1} " in of[number] for number in dropped & planted.copies.keys()
    )


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.8])
def test_what_is_dropped_is_as_similar_as_asked_for_and_what_is_kept_is_not(tmp_path, threshold):
    draw = random.Random(1)
    originals = [text(draw).lower().replace(".", "") for _ in range(12)]
    texts = [
        " ".join(word if draw.random() > share else f"y{draw.randrange(10**6)}" for word in original.split())
        for original in originals
        for share in (0, 0.02, 0.05, 0.1, 0.2, 0.4)
    ]
    found = curate(tmp_path, [{"text": one} for one in texts], near_duplicates={"similarity": threshold})
    kept = [row["text"] for row in found.rows]
    assert all(jaccard(one, other) < threshold for one, other in itertools.combinations(kept, 2))
    for row in found.dropped:
        assert max(jaccard(texts[row["line"] - 1], one) for one in kept) >= threshold


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.7, 0.9, 1.0])
def test_bands_find_what_is_as_similar_as_asked_for(threshold):
    values = values_per_band(threshold)
    assert 1 - (1 - threshold**values) ** (NUM_HASHES // values) >= 0.995


def test_many_copies_of_one_row_leave_the_first(tmp_path):
    draw = random.Random(2)
    original = text(draw)
    rows = [{"text": near_duplicate(draw, original, 4)} for _ in range(3000)]
    found = curate(tmp_path, rows, near_duplicates={})
    assert found.rows == rows[:1]


def test_many_copies_are_held_out_together_in_time_that_grows_with_their_number(tmp_path):
    draw = random.Random(3)
    near, exact, *others = (text(draw) for _ in range(32))
    texts = [*(near_duplicate(draw, near, 4) for _ in range(1200)), *[exact] * 2000, *others]
    draw.shuffle(texts)
    began_s = time.process_time()
    found = curate(tmp_path, [{"text": one} for one in texts], held_out={"fraction": 0.5})
    assert time.process_time() - began_s < 15, "comparing each with each takes twice as long"
    held_out, trained_on = (
        {row["text"] for row in lines(found.folder / "data" / f"{split}.jsonl")} for split in ("validation", "train")
    )
    assert held_out and trained_on and not held_out & trained_on
    assert len({one in held_out for one in texts if one.startswith("Posted by")}) == 1


def test_sums_of_other_numbers_and_signs_are_no_near_duplicates(tmp_path):
    rows = [
        {"prompt": f"What is {a} {sign} {b}?", "completion": str(a + b)}
        for a in range(5)
        for b in range(5)
        for sign in "+-"
    ]
    assert curate(tmp_path, rows, near_duplicates={}).rows == rows


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Ｗhat a café!", "what a cafe\u0301"),
        ("中文没有空格", "中文 没有 空格。"),
    ],
)
def test_how_a_text_is_written_makes_no_other_words(one, other):
    assert words_of(one) == words_of(other)


def test_a_language_without_spaces_has_more_than_one_word():
    assert words_of("今天天气很好 ok") == [*"今天天气很好", "ok"]


def test_a_rejected_answer_is_no_copy_of_the_same_answer_chosen():
    good, bad = ("a b c d e f",), ("g h i j k l",)
    pair, swapped = set_of((good, bad), None, 3), set_of((bad, good), None, 3)
    assert not set(pair) & set(swapped)
    assert not set(set_of((good,), True, 3)) & set(set_of((good,), False, 3))


def test_exact_duplicates_are_rows_from_which_the_same_is_learned(tmp_path):
    rows = [
        {"messages": CHAT, "id": 1},
        {"messages": CHAT, "id": 2},
        {"messages": [*CHAT[:1], {"role": "assistant", "content": "46."}]},
        {"messages": [*CHAT[:1], {"role": "assistant", "content": "46", "loss": False}, *CHAT]},
    ]
    found = curate(tmp_path, {"first": rows, "second": rows[2:3]}, exact_duplicates=True)
    assert found.rows == [rows[0], *rows[2:]]
    assert [(row["dataset"], row["line"], row["step"], row["reason"]) for row in found.dropped] == [
        ("first", 2, "exact_duplicates", "says the same as first train.jsonl:1"),
        ("second", 1, "exact_duplicates", "says the same as first train.jsonl:3"),
    ]


def test_rows_without_words_are_no_near_duplicates(tmp_path):
    rows = [{"text": "🙂"}, {"text": "🙃"}, {"text": "?!"}]
    assert curate(tmp_path, rows, near_duplicates={}).rows == rows
