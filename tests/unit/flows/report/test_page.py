"""The HTML report in a real browser shows the recorded numbers, escapes hostile text, and can be used by keyboard."""

import hashlib
import json

import pytest
from PIL import Image

from flows.champion.differing import compare, side_of_refresh
from flows.report.page import comparison_page, page, write_report
from flows.report.reading import read_report
from tests.chromium import opened, started
from tests.unit.flows.report.conftest import HOSTILE, LAYOUTS, LENGTHS, METRICS
from tests.unit.stages.data.media.conftest import encoded

MOST_BYTES = 2_000_000


@pytest.fixture(scope="module")
def browser():
    with started() as browser:
        yield browser


@pytest.fixture
def shot(tmp_path_factory):
    """Provide a function that saves a screenshot of the HTML report in a temporary folder."""
    folder = tmp_path_factory.mktemp("screenshots")

    def shot(page, name):
        page.screenshot(path=folder / f"{name}.png", full_page=True)
        print(f"screenshot: {folder / name}.png")

    return shot


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (380, "light")])
def test_the_page_opens_without_errors_and_requests_and_fits_the_screen(night, store, browser, shot, width, scheme):
    night.refresh()
    file = write_report(night.refresh(), store.index())
    assert file.stat().st_size < MOST_BYTES
    with opened(browser, file, width, scheme) as (shown, seen):
        shot(shown, f"report-{scheme}-{width}")
        assert shown.locator(".chart canvas").count() == 1
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        drawing = shown.locator("#stages + .wide svg").bounding_box()
        assert width < 600 or drawing["x"] + drawing["width"] <= width
    assert seen.errors == []
    assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (380, "light")])
def test_layouts_of_a_comparison_are_a_section_of_the_report(comparison, store, browser, shot, width, scheme):
    file = write_report(comparison, store.index())
    with opened(browser, file, width, scheme) as (shown, seen):
        shot(shown, f"comparison-{scheme}-{width}")
        text = shown.inner_text("main")
        assert "2 rounds in alternating order, each of 1 warm-up and 3 measured steps" in text
        assert f"{HOSTILE}: no memory {HOSTILE}" in text
        found = shown.eval_on_selector_all("[data-layout]", "all => all.map(e => [e.dataset.layout, +e.dataset.value])")
        first, second, _ = LAYOUTS
        assert dict(found) == {
            f"{first}/Throughput": 100.0,
            f"{second}/Throughput": 150.0,
            f"{first}/Step time": 1.0,
            f"{second}/Step time": 0.6,
            f"{second}/Memory of the process that needs most": 2.0,
            f"{first} (devices: 1, rows a step: 8)/Strong scaling": 100.0,
            f"{second} (devices: 2, rows a step: 8)/Strong scaling": 150.0,
        }
        drawn = {mark: shown.locator(f".layouts .track {mark}").count() for mark in ("b", "u", "em")}
        assert drawn == {"b": 2, "u": 4, "em": 2}
        heading = shown.locator(".layouts td").first.evaluate("cell => getComputedStyle(cell).position")
        assert heading == "sticky"
        tracks = [one.bounding_box()["width"] for one in shown.locator(".layouts .track").all()]
        assert min(tracks) >= 0.3 * width
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.errors == []
    assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_a_wide_graph_and_a_long_error_are_seen_to_their_ends(night, store, browser):
    error = f"cannot read {'x' * 400}: expected one of {', '.join(map(str, range(200)))}, found THE END"
    file = write_report(night.refresh(failing="promote", error=error), store.index())
    with opened(browser, file, 700) as (shown, _):
        drawing = shown.locator("#stages + .wide svg").bounding_box()
        assert drawing["x"] + drawing["width"] <= 700
        box = shown.locator("pre").first
        assert "THE END" in box.inner_text()
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_steps_on_an_axis_are_whole_numbers(night, store, browser):
    file = write_report(night.refresh(), store.index())
    with opened(browser, file) as (shown, _):
        steps = shown.evaluate(
            """async () => {
                const written = [], draw = CanvasRenderingContext2D.prototype.fillText;
                CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
                    written.push(text); draw.call(this, text, ...at);
                };
                document.querySelector("fieldset label:last-of-type input").click();  // draws again
                await new Promise((done) => setTimeout(done, 300));
                return written;
            }"""
        )
        whole = [text for text in steps if text in ("1", "2", "3", "4")]
        assert whole and not [text for text in steps if text in ("1.5", "1.25", "2.5", "3.5")]


def test_on_a_phone_each_bar_is_below_its_own_name_and_number(night, store, browser):
    file = write_report(night.refresh(), store.index())
    with opened(browser, file, 380) as (shown, _):
        for of_part in ("#time ~ .bars >> nth=0", "[aria-label='Shares of the mixture of sft']"):
            bars = shown.locator(of_part).locator(":scope > div")
            names, tracks, numbers = (
                [one.bounding_box() for one in bars.locator(f":scope > {where}").all()]
                for where in ("span:first-child", ".track", ".v")
            )
            assert len(names) == len(tracks) == len(numbers) > 1
            assert {round(one["x"]) for one in names} == {round(tracks[0]["x"])}
            for name, track, value in zip(names, tracks, numbers, strict=True):
                assert abs(name["y"] - value["y"]) < 2
                assert name["y"] + name["height"] <= track["y"] + 1
                assert value["x"] + value["width"] <= track["x"] + track["width"] + 1


def test_the_numbers_are_those_of_the_records(night, store, browser, tmp_path):
    file = write_report(night.refresh(), store.index())
    with opened(browser, file) as (shown, _):
        found = shown.eval_on_selector_all("[data-metric]", "all => all.map(e => [e.dataset.metric, +e.dataset.value])")
        assert dict(found) == {f"{stage}/{name}": value for stage, of in METRICS.items() for name, value in of.items()}
        scores = shown.eval_on_selector_all("[data-score]", "all => all.map(e => [e.dataset.score, +e.dataset.value])")
        assert dict(scores) == {"scores-base/sums.exact_match": 0.0, "scores/sums.exact_match": 0.9375}
        lengths = shown.eval_on_selector_all(
            "[data-length]", "all => all.map(e => [e.dataset.length, +e.dataset.value])"
        )
        assert lengths == [[f"sft, {name}", count] for name, of in LENGTHS.counts.items() for count in of]
        assert float(shown.get_attribute("[data-share='sft/old']", "data-value")) == 0.26
        assert "75.0% asked for" in shown.inner_text("main")
        hours = shown.get_attribute("[data-cost=device-hours]", "data-value")
        assert float(hours) == pytest.approx(7 * 2 * 10 / 3600)


def test_hostile_text_is_shown_and_not_run(night, store, browser):
    file = write_report(night.refresh(failing="sft"), store.index())
    with opened(browser, file) as (shown, seen):
        assert HOSTILE in shown.inner_text("#failures ~ pre")
        assert shown.locator("img").count() == 0
    assert seen.errors == []


def test_questions_have_their_pictures_or_say_where_they_are_gone(night, store, browser, shot, tmp_path):
    record = night.refresh()
    folder, artifact = tmp_path / "tasks", record.stages["scores"].artifact
    folder.mkdir()
    (folder / "red.png").write_bytes(encoded(Image.new("RGB", (400, 200), "red")))
    digest = hashlib.sha256((folder / "red.png").read_bytes()).hexdigest()
    medium = {"kind": "image", "path": "red.png", "sha256": digest, "width": 400, "height": 200}
    media = [medium, {**medium, "path": "../red.png"}, {**medium, "sha256": "0" * 64}, {"path": HOSTILE}]
    config = {"kind": "evaluate", "name": "scores", "version": "0" * 12, "inputs": {}, "cache": str(tmp_path)}
    (artifact / "config.json").write_text(json.dumps({**config, "config": {"task_folder": str(folder)}}))
    for stage, answers in {"scores-base": ("red", "red"), "scores": ("red", "blue")}.items():
        rows = [
            {"doc_id": number, "question": "<image>Which?", "resps": [[said]], "target": "red", "media": media}
            | {"metrics": ["rating"], "rating": 9 if said == "red" else 2}
            for number, said in enumerate(answers)
        ]
        (samples := record.stages[stage].artifact / "samples").mkdir()
        (samples / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = write_report(record, store.index())
    assert file.stat().st_size < MOST_BYTES
    with opened(browser, file) as (shown, seen):
        drawn = shown.eval_on_selector_all("td img, th img", "all => all.map(e => [e.naturalWidth, e.naturalHeight])")
        assert drawn == [[128, 64]] * 2
        shot(shown, "pictures")
        said = shown.inner_text(".answers")
        assert said.index("worse than scores-base") < said.index("rating 2") < said.rindex("rating 9")
        assert "leads out of the dataset's folder" in said and "has changed" in said and "picture 4 cannot be" in said
    assert seen.errors == []
    folder.rename(tmp_path / "moved")
    with opened(browser, write_report(record, store.index())) as (shown, seen):
        assert shown.locator("img").count() == 0
        assert shown.inner_text(".answers").count("picture 1 cannot be shown: the picture red.png of ") == 2
    assert seen.errors == []


def test_a_hostile_name_of_a_curve_does_not_end_the_script(night, store, browser, tmp_path):
    report = read_report(night.refresh(), store.index())
    [training] = report.trainings
    curves = (training.curves[0].model_copy(update={"name": HOSTILE}),)
    hostile = report.model_copy(update={"trainings": (training.model_copy(update={"curves": curves}),)})
    file = tmp_path / "hostile.html"
    file.write_text(page(hostile))
    with opened(browser, file) as (shown, seen):
        assert shown.inner_text(".chart .u-legend .u-series:nth-child(2) .u-label") == HOSTILE
    assert seen.errors == []


def test_curves_are_read_zoomed_and_hidden_by_keyboard_and_mouse(night, store, browser):
    night.refresh()
    file = write_report(night.refresh(), store.index())
    with opened(browser, file) as (shown, seen):
        chart, said = shown.locator(".chart"), shown.locator("figure [role=status]")
        chart.focus()
        shown.keyboard.press("ArrowRight")
        assert said.inner_text().startswith("step 1: loss 1.500, loss, champion of ")
        shown.keyboard.press("End")
        assert said.inner_text().startswith("step 4: loss 0.2500")
        shown.keyboard.press("+")
        shown.get_by_role("checkbox", name="loss, champion").uncheck()
        assert shown.locator(".u-legend .u-series.u-off").count() == 1
        shown.get_by_role("checkbox", name="logarithmic").check()
        chart.focus()
        shown.keyboard.press("0")
        over = shown.locator(".chart .u-over").bounding_box()
        shown.mouse.move(over["x"] + 1, over["y"] + 50)
        assert "1.500" in shown.inner_text(".chart .u-legend")
    assert seen.errors == []


def test_two_refreshes_stand_side_by_side(night, store, browser, tmp_path, shot):
    old, new = night.refresh(), night.refresh()
    index = store.index()
    found = compare(side_of_refresh(old, index), side_of_refresh(new, index), tmp_path / "kept")
    file = tmp_path / "compared.html"
    file.write_text(comparison_page(read_report(old, index), read_report(new, index), found.by_heading()))
    with opened(browser, file) as (shown, seen):
        shot(shown, "compared")
        text = shown.inner_text("main")
        assert "learning_rate 0.001 → 0.002" in text
        assert "No metric of a stage that both have differs." in text
        shared = sum(map(len, METRICS.values()))
        assert f"{shared} metrics that are equal" in text
        labels = shown.locator("fieldset label").all_inner_texts()
        assert labels == ["loss, nightly-2", "loss, nightly-1", "logarithmic"]
    assert seen.errors == []


def test_everything_that_is_drawn_is_named_for_those_who_cannot_see_it(night, store, browser):
    file = write_report(night.refresh(), store.index())
    with opened(browser, file) as (shown, _):
        assert shown.get_attribute("html", "lang") == "en"
        unnamed = "all => all.filter(e => !e.getAttribute('aria-label') && !e.getAttribute('aria-hidden')).length"
        assert shown.eval_on_selector_all("svg, .chart, .track, [role=region]", unnamed) == 0
        regions = shown.eval_on_selector_all("[role=region]", "all => all.map(e => e.getAttribute('aria-label'))")
        assert len(set(regions)) == len(regions)
        anchors = shown.eval_on_selector_all("a[href^='#']", "all => all.map(e => e.getAttribute('href').slice(1))")
        assert [one for one in anchors if shown.locator(f"[id='{one}']").count() != 1] == []
