"""From rows with pictures to prepared documents: the tokens are the processor's, and no picture is cut or lost."""

import json
import os
import re
import subprocess
from base64 import b64decode, b64encode
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoProcessor

from flows.cli.data_views import caption, data_page
from stages.core.errors import DataError
from stages.data.config import DataConfig
from stages.data.look import Visits, look_at
from stages.data.media.images import decode_picture, from_data_address
from stages.data.prepare import prepare
from stages.kinds.train.media import digest_of, numbers_of, write_list
from stages.models.facts import ModelFacts
from stages.models.processor import MediaProcessor
from tests.unit.stages.data.media.conftest import EXPANDED, NUM_TOKENS, PICTURE, encoded, noise
from tests.unit.stages.data.reports import Reports


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def text(words):
    return {"type": "text", "text": words}


IMAGE = {"type": "image"}
CAT = assistant("a cat")
FORMS = {
    "TRL: parts and images": (
        {"messages": [user([text("see "), IMAGE]), CAT], "images": ["a.png"]},
        ["see ", EXPANDED],
        ["a.png"],
    ),
    "TRL: strings and images": (
        {"messages": [user("both?"), CAT], "images": ["b.png", "a.png"]},
        [EXPANDED, EXPANDED, "both?"],
        ["b.png", "a.png"],
    ),
    "TRL: an image in its part": (
        {"messages": [user([{"type": "image", "image": "b.png"}, text("?")]), CAT]},
        [EXPANDED, "?"],
        ["b.png"],
    ),
    "nulls of Arrow": (
        {"messages": [user([{"type": "image", "text": None}, text("?")]), CAT], "images": [{"path": "a.png"}]},
        [EXPANDED, "?"],
        ["a.png"],
    ),
    "llava-instruct-mix-vsft: parts with numbers": (
        {
            "messages": [
                user([{"index": number, "text": None, **IMAGE} for number in (0, 1)] + [{"index": None, **text("?")}]),
                assistant([{"index": None, **text("a cat")}]),
            ],
            "images": ["a.png", "b.png"],
        },
        [EXPANDED, EXPANDED, "?"],
        ["a.png", "b.png"],
    ),
    "ms-swift": (
        {"messages": [user("<image>and<image>?"), CAT], "images": ["a.png", "b.png"]},
        [EXPANDED, "and", EXPANDED, "?"],
        ["a.png", "b.png"],
    ),
    "ms-swift: one image": ({"query": "<image>?", "response": "a cat", "image": "a.png"}, [EXPANDED, "?"], ["a.png"]),
    "LLaMA-Factory: sharegpt": (
        {
            "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a cat"}],
            "images": ["a.png"],
        },
        [EXPANDED, "?"],
        ["a.png"],
    ),
    "LLaMA-Factory: alpaca": (
        {"instruction": "<image>what", "input": "is it?", "output": "a cat", "images": ["a.png"]},
        [EXPANDED, "what\nis it?"],
        ["a.png"],
    ),
    "OpenAI": (
        {"messages": [user([{"type": "image_url", "image_url": {"url": "a.png"}}, text("?")]), CAT]},
        [EXPANDED, "?"],
        ["a.png"],
    ),
    "OpenAI: responses": (
        {
            "messages": [
                user(
                    [
                        {"type": "input_image", "image_url": "a.png", "detail": "low"},
                        {**text("?"), "type": "input_text"},
                    ]
                ),
                assistant([{"type": "output_text", "text": "a cat"}]),
            ]
        },
        [EXPANDED, "?"],
        ["a.png"],
    ),
    "an address of this machine": (
        {"messages": [user("?"), CAT], "images": ["file://a.png"]},
        [EXPANDED, "?"],
        ["a.png"],
    ),
    "a tag without media is text": ({"messages": [user("<image> in HTML?"), CAT]}, ["<image> in HTML?"], []),
    "the processor's own token is text": (
        {"messages": [user(f"{PICTURE}<start_of_image>"), CAT]},
        [f"{PICTURE}<start_of_image>"],
        [],
    ),
}
REFUSED = {
    "fewer places": (
        {"messages": [user("<image>?"), CAT], "images": ["a.png", "b.png"]},
        "has 2 images, but 1 place for them in its text; expected as many, or no place at all",
    ),
    "more places": (
        {"messages": [user("<image><image>?"), CAT], "images": ["a.png"]},
        "has a place for image 2 in its text, but 1 image beside it",
    ),
    "a number out of order": (
        {"messages": [user([{"index": 1, **IMAGE}, {"index": 0, **IMAGE}]), CAT], "images": ["a.png", "b.png"]},
        "has the index 1 in the place for image 1 in its text; expected 0",
    ),
    "a place without column": ({"messages": [user([IMAGE]), CAT]}, "has a place for image 1 in its text, but 0 images"),
    "an address": (
        {"messages": [user("<image>"), CAT], "images": ["https://x/a.png"]},
        "has the address 'https://x/a.png' as image; nothing is fetched",
    ),
    "a missing file": (
        {"messages": [user("?"), CAT], "images": ["c.png"]},
        "has the path 'c.png', where there is no file",
    ),
    "an absolute path": ({"messages": [user("?"), CAT], "images": ["/etc/hosts"]}, "leads out of the dataset's folder"),
    "a path upwards": (
        {"messages": [user("?"), CAT], "images": ["../secret.png"]},
        "leads out of the dataset's folder",
    ),
    "a link out of it": ({"messages": [user("?"), CAT], "images": ["link.png"]}, "leads out of the dataset's folder"),
    "no picture": ({"messages": [user("?"), CAT], "images": ["text.png"]}, "'text.png', which is no picture"),
    "frames": (
        {"messages": [user("<video>?"), CAT], "videos": [["a.png", "b.png"]]},
        "has a list as video; expected a path",
    ),
    "sound": (
        {"messages": [user([{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]), CAT]},
        "has a sound inside of it, which is no sound that can be decoded",
    ),
    "image and images": ({"messages": [user("?"), CAT], "image": "a.png", "images": ["a.png"]}, "`image` and `images`"),
    "what the assistant shows": (
        {"messages": [user("draw"), assistant([IMAGE])], "images": ["a.png"]},
        "has media in message 2 of `messages`, of the assistant",
    ),
    "what the assistant tags": (
        {"messages": [user("<image>"), assistant("<image>")], "images": ["a.png", "b.png"]},
        "has `<image>` in what the assistant says",
    ),
    "plain text": ({"prompt": "a", "completion": "b", "images": ["a.png"]}, "has `images` beside plain text"),
    "boxes to fill in": (
        {"messages": [user("<image><bbox>?"), CAT], "images": ["a.png"], "objects": {"bbox": [[1, 2, 3, 4]]}},
        "has `objects` beside `<bbox>`",
    ),
    "what a part says of its size": (
        {"messages": [user([{"type": "image", "image": "a.png", "max_pixels": 9}]), CAT]},
        "has `max_pixels` in a part of `content` of message 1 of `messages` for image, which is not read here",
    ),
    "a form of a part that is not read, beside a column": (
        {"messages": [user([{"type": "image", "source": {"data": "AA=="}}]), CAT], "images": ["a.png"]},
        "has `source` in a part of `content`",
    ),
    "a link to itself": (
        {"messages": [user("?"), CAT], "images": ["loop.png"]},
        "has the path 'loop.png', where there is no file",
    ),
    "a link to nothing": (
        {"messages": [user("?"), CAT], "images": ["nothing.png"]},
        "has the path 'nothing.png', where there is no file",
    ),
    "media of a message": (
        {"messages": [{**user("?"), "images": ["a.png"]}, CAT]},
        "has `images` of message 1 of `messages`; expected media in columns",
    ),
    "a part of another type": (
        {"messages": [user([{"type": "refusal"}]), CAT]},
        "has refusal in `content` of message 1",
    ),
}


@pytest.fixture
def run(tmp_path, seeing_folder, pictures):
    """Provide a function that prepares rows beside the pictures `a.png` and `b.png`."""

    def prepare_rows(*rows, kind="examples", model=seeing_folder, **options):
        folder = tmp_path / "data"
        if not (folder / "a.png").exists():
            pictures("a.png", "b.png")
            (tmp_path / "secret.png").write_bytes((folder / "a.png").read_bytes())
            (folder / "text.png").write_text("<html>")
            (folder / "link.png").symlink_to(tmp_path / "secret.png")
            (folder / "loop.png").symlink_to(folder / "loop.png")
            (folder / "nothing.png").symlink_to(folder / "c.png")
        if rows:
            (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return prepare(
            folder,
            DataConfig(dataset="data", **{"sequence_length": 256, **options}),
            ModelFacts(model),
            rows=kind,
            cache=tmp_path / "cache",
            report=prepare_rows.reports,
            bad_rows_file=tmp_path / "bad_rows.jsonl",
        )

    prepare_rows.reports = Reports()
    return prepare_rows


def documents(dataset, folder):
    """Return each document's text, the text that is learned, and the paths of its media."""
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    found = []
    for row in range(len(dataset)):
        for (tokens, loss), media in zip(dataset.documents(row), dataset.media(row), strict=True):
            found.append((tokenizer.decode(tokens), tokenizer.decode(tokens[loss]), [one.path for one in media]))
    return found


@pytest.mark.parametrize(("row", "asked", "paths"), FORMS.values(), ids=FORMS)
def test_every_form_of_a_row_is_read(run, seeing_folder, row, asked, paths):
    ((whole, learned, found),) = documents(run(row).training, seeing_folder)
    assert whole == f"<|im_start|>user\n{''.join(asked)}<|im_end|>\n<|im_start|>assistant\na cat<|im_end|>\n"
    assert (learned, found) == ("a cat<|im_end|>", paths)


def test_pictures_inside_of_rows_stay_there(run, tmp_path):
    """Parquet as `datasets` writes it, and base64, are read again by file, row and digest."""
    own = [encoded(noise(seed=seed)) for seed in range(5)]
    rows = [
        {"messages": [user(f"<image>{number}"), CAT], "images": [{"bytes": data, "path": None}]}
        for number, data in enumerate(own)
    ]
    rows[3]["images"] = ["a.png"]
    cells = [[one if isinstance(one, dict) else {"bytes": None, "path": one} for one in row["images"]] for row in rows]
    schema = pyarrow.schema(
        [
            ("messages", pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))),
            ("images", pyarrow.list_(pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))),
        ]
    )
    arrays = pyarrow.Table.from_pylist(
        [{"messages": row["messages"], "images": cell} for row, cell in zip(rows, cells, strict=True)], schema
    )
    base64s = [f"data:image/png;base64,{b64encode(data).decode()}" for data in own]
    looks_alike = text("data: a text that is no medium")
    parts = [
        {"messages": [user([looks_alike, {"type": "image_url", "image_url": {"url": url}}]), CAT]} for url in base64s
    ]
    for name, write in {
        "train.parquet": lambda path: pyarrow.parquet.write_table(arrays, path, row_group_size=2),
        "train.jsonl": lambda path: path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in parts)),
    }.items():
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        for path in folder.glob("train.*"):
            path.unlink()
        write(folder / name)
        dataset = run(packing=False).training
        found = {}
        for row in range(len(dataset)):
            ((medium,),) = dataset.media(row)
            ((image,),) = dataset.pictures(row)
            found[medium.path] = np.asarray(image)
        first = 1 if name == "train.parquet" else 2
        expected = {f"{name}#{number}": noise(seed=number - first) for number in range(first, first + 5)}
        if name == "train.parquet":
            del expected["train.parquet#4"]
            expected["a.png"] = noise(seed=0)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[path], np.asarray(image)) for path, image in expected.items())


@pytest.mark.parametrize(("row", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_with_media_is_said_by_file_and_row(run, row, message):
    with pytest.raises(DataError, match=r"train\.jsonl:1 has ") as error:
        run(row)
    assert message in str(error.value)


def test_tokens_are_those_of_the_processor_and_pictures_are_never_learned(run, seeing_folder, tmp_path):
    messages = [
        user([text("one "), IMAGE, text(" two "), IMAGE]),
        assistant("first"),
        user([IMAGE, text("again")]),
        assistant("second"),
    ]
    row = {"messages": messages, "images": ["a.png", "b.png", "a.png"]}
    for train_on in ("assistant", "all"):
        dataset = run(row, train_on=train_on).training
        ((tokens, loss),) = dataset.documents(0)
        processor = AutoProcessor.from_pretrained(seeing_folder)
        listed = [
            one if isinstance(one["content"], list) else {**one, "content": [text(one["content"])]} for one in messages
        ]
        images = [decode_picture((tmp_path / "data" / name).read_bytes()) for name in row["images"]]
        expected = processor(text=[processor.apply_chat_template(listed, tokenize=False)], images=[images])[
            "input_ids"
        ][0]
        assert tokens.tolist() == expected
        of_pictures = np.isin(tokens, processor.tokenizer.convert_tokens_to_ids([PICTURE, "<start_of_image>"]))
        assert of_pictures.sum() == 3 * 5
        assert not (loss & of_pictures).any()
        learned = processor.tokenizer.decode(tokens[loss])
        assert learned == "first<|im_end|>second<|im_end|>" if train_on == "assistant" else "one " in learned


def test_prompts_with_pictures_are_kept_for_the_server_to_read(run, tmp_path):
    """The first 8, each with the tokens up to its last answer; a picture is read when the prompt is recorded."""
    turns = [user([IMAGE, text("one?")]), assistant("first"), user("and?"), CAT]
    rows = [{"messages": turns, "images": ["a.png"]}, *({"messages": [user(f"{n}?"), CAT]} for n in range(9))]
    dataset = run(*rows, *rows[:1] * 9).training
    assert len(dataset.prompts) == 8
    prompt = dataset.prompts[0]
    ((tokens, _),) = dataset.documents(0)[:1]
    assert prompt.token_ids == tokens[: len(prompt.token_ids)].tolist()
    assert len(tokens) - len(prompt.token_ids) == len("a cat") + 2  # the end of the turn, and of the line
    assert [message["content"] for message in prompt.messages] == [turns[0]["content"], "first", "and?"]
    (address,) = prompt.pictures
    assert decode_picture(from_data_address(address)).tobytes() == noise(seed=0).tobytes()
    (tmp_path / "data" / "a.png").write_bytes(encoded(noise(seed=7)))
    with pytest.raises(DataError, match="has changed"):
        _ = dataset.prompts


def test_both_answers_of_a_pair_and_labelled_answers_have_the_pictures(run, seeing_folder):
    pair = {"prompt": [user("<image>?")], "chosen": [CAT], "rejected": [assistant("a dog")], "images": ["a.png"]}
    chosen, rejected = documents(run(pair, kind="pairs").training, seeing_folder)
    assert (chosen[1:], rejected[1:]) == (("a cat<|im_end|>", ["a.png"]), ("a dog<|im_end|>", ["a.png"]))
    good = {"prompt": [user([IMAGE])], "completion": [CAT], "label": True, "images": ["a.png"]}
    bad = {"messages": [user("<image>"), assistant("a dog")], "label": False, "images": ["b.png"]}
    labelled = run(
        good, {**good, "label": False, "completion": [assistant("a dog")], "images": ["b.png"]}, kind="labelled"
    )
    assert [one[2] for one in documents(labelled.training, seeing_folder)] == [["a.png"], ["b.png"]]
    whole = {"messages": bad["messages"], "rejected_messages": [user("<image>"), CAT], "images": ["b.png"]}
    assert [one[2] for one in documents(run(whole, kind="pairs").training, seeing_folder)] == [["b.png"]] * 2


def test_truncation_never_cuts_a_picture(run, seeing_folder):
    late = {"messages": [user("x" * 70 + "<image>"), CAT], "images": ["a.png"]}
    early = {"messages": [user("<image>?"), assistant("y" * 90)], "images": ["b.png"]}
    dataset = run(late, early, sequence_length=80, over_long="truncate").training
    ((whole, _, paths),) = documents(dataset, seeing_folder)
    assert EXPANDED in whole
    assert paths == ["b.png"]
    assert "2 of 2 rows have more than sequence_length 80 tokens" in run.reports.warnings[-1]
    assert "1 were left out, whose media would have been cut" in run.reports.warnings[-1]


def test_no_row_has_more_patches_than_the_bound(run, seeing_folder):
    of_picture = MediaProcessor(seeing_folder).num_patches((40, 24))
    rows = [
        {"messages": [user("<image>" * (1 + number % 3) + f"{number}"), CAT], "images": ["a.png"] * (1 + number % 3)}
        for number in range(40)
    ]
    rows += [{"messages": [user(f"{number} " + "x" * 100), CAT]} for number in range(40)]
    free = run(*rows, sequence_length=512).training
    assert free.about.most_patches > 4 * of_picture
    assert run(*rows, sequence_length=512, max_patches=free.about.most_patches).training.num_tokens == free.num_tokens
    bounded = run(*rows, sequence_length=512, max_patches=4 * of_picture).training
    assert bounded.about.most_patches == 4 * of_picture
    assert sorted(documents(bounded, seeing_folder)) == sorted(documents(free, seeing_folder))
    # A bound below the largest document's pictures leaves such documents out by name, or stops.
    with pytest.raises(DataError, match=r"13 of 80 documents or pairs have media of more than max_patches .*a\.png"):
        run(*rows, sequence_length=512, max_patches=2 * of_picture)
    fewer = run(*rows, sequence_length=512, max_patches=2 * of_picture, over_long="drop").training
    assert (fewer.about.num_documents, fewer.about.most_patches) == (67, 2 * of_picture)
    assert "the one with a.png and 2 more" in run.reports.warnings[-1]
    alone = run(*rows, sequence_length=512, max_patches=2 * of_picture, over_long="drop", packing=False).training
    assert len(alone) == 67


def test_one_changed_picture_changes_the_digest_that_names_all(run, tmp_path):
    rows = [{"messages": [user("<image>?"), CAT], "images": [name]} for name in ("a.png", "b.png", "a.png", "link")]
    run(*rows[:1])
    folder = tmp_path / "data"
    (folder / "link").write_bytes((folder / "a.png").read_bytes())
    before = run(*rows).training.distinct_media
    assert sorted(medium.path for medium in before) == ["a.png", "b.png", "link"]
    assert numbers_of(before) == {"num_different_pictures": 2}, "one lies there under two names"
    odd = {replace(medium, path=medium.path.replace("link", "../data/\\li\nnk")) for medium in before}
    write_list(odd, tmp_path)
    (folder / "\\li\nnk").write_bytes((folder / "a.png").read_bytes())
    command = ["sha256sum", "-c", "--strict", tmp_path / "media.sha256"]
    assert subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout.count(b"OK") == 3
    (folder / "b.png").write_bytes(encoded(noise((24, 40))))
    assert subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 1
    after = run().training.distinct_media
    assert numbers_of(after) == numbers_of(before) and digest_of(after) != digest_of(before)


def test_the_cache_has_no_pixels_and_little_beside_tokens(run, seeing_folder, tmp_path):
    rows = [{"messages": [user(f"<image>{number}"), CAT], "images": ["a.png"]} for number in range(200)]
    dataset = run(*rows).training
    assert dataset.about.num_media == 200 and len(dataset.distinct_media) == 1
    of_picture = MediaProcessor(seeing_folder).num_patches((40, 24))
    most = max(len(list(chain(*dataset.media(row)))) for row in range(len(dataset)))
    assert (dataset.about.num_patches, dataset.about.most_patches) == (200 * of_picture, most * of_picture)
    media_bytes = sum(path.stat().st_size for path in dataset.folder.glob("media*.bin"))
    assert media_bytes <= 200 * (64 + len("a.png"))
    (piece,) = (tmp_path / "cache/pieces").glob("*.safetensors")
    per_row = (piece.stat().st_size - 5 * dataset.num_tokens) / 200
    assert per_row <= 64 + len("a.png") + 48, "48: digests and lengths that text rows have too"


def test_pictures_that_change_are_found_before_and_after_they_are_decoded(run, tmp_path):
    row = {"messages": [user("<image>?"), CAT], "images": ["a.png"]}
    dataset = run(row).training
    assert [[one.size for one in pictures] for pictures in dataset.pictures(0)] == [[(40, 24)]]
    path = tmp_path / "data/a.png"
    status, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + b"\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run(row).training.key == dataset.key, "size and time are equal"
    with pytest.raises(DataError, match=r"the picture a\.png of .* has changed since its row was read"):
        dataset.pictures(0)
    path.write_bytes((tmp_path / "data/b.png").read_bytes())
    assert run(row).training.key != dataset.key


def test_a_model_that_reads_text_alone_refuses_pictures_by_row(run, tokenizer_folder):
    with pytest.raises(DataError, match=r"train\.jsonl:1 has `images`, which this model, or this stage, does not read"):
        run({"messages": [user("?"), CAT], "images": ["a.png"]}, model=tokenizer_folder)


def test_data_are_shown_with_their_pictures(run, seeing_folder, tmp_path):
    run({"messages": [user("<image>?"), CAT], "images": ["a.png"]})
    config = DataConfig(dataset="mine", sequence_length=256)
    options = {"rows": "examples", "visits": lambda _: Visits([0]), "cache": tmp_path / "cache", "scratch": tmp_path}
    look = look_at({"mine": tmp_path}, config, ModelFacts(seeing_folder), **options)
    ((document,),) = (row.documents for row in look.rows)
    (picture,) = document.pictures
    num_tokens = NUM_TOKENS + 2 + 2 * len("\n\n")
    assert caption(picture) == f"a.png: 40 × 24 pixels, {num_tokens} tokens"
    assert f"{PICTURE} × {NUM_TOKENS}" in [piece.text for piece in document.pieces]
    page = data_page(look, "data")
    (address,) = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)"', page)
    small = decode_picture(b64decode(address))
    assert small.size == (40, 24)
    grey, expected = (np.asarray(one.convert("L"), int) for one in (small, noise(seed=0)))
    assert np.abs(grey - expected).mean() < 20
