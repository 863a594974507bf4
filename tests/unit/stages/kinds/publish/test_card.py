"""The published model card has the recorded facts, can be read by the hub's parser, and exposes nothing private."""

import re

import pytest
from huggingface_hub import ModelCard

from tests import published


def card_of(promoted, **options) -> ModelCard:
    refresh = promoted("file:///srv/adder", dry_run=True, **options)
    refresh.publish()
    return ModelCard(refresh.card)


def test_the_hub_reads_what_the_records_say(promoted):
    data = card_of(promoted).data
    assert (data.license, data.base_model, data.datasets) == ("apache-2.0", "owner/base", ["owner/rows"])
    assert (data.library_name, data.base_model_relation) == ("transformers", "quantized")
    (score,) = data.eval_results
    assert (score.dataset_name, score.metric_type, score.metric_value) == ("sums", "exact_match", 0.9)


def test_an_adapter_is_one_of_its_base(promoted):
    data = card_of(promoted, adapter=True).data
    assert (data.library_name, data.base_model_relation, data.base_model) == ("peft", "adapter", "owner/base")


def test_a_gguf_file_is_for_programs_that_read_those(promoted, monkeypatch):
    write_model = published._write_model

    def as_gguf(work, content):
        write_model(work, content)
        (work / "model" / "model.safetensors").rename(work / "model" / "model.gguf")

    monkeypatch.setattr(published, "_write_model", as_gguf)
    assert card_of(promoted).data.library_name == "gguf"


def test_a_person_reads_scores_with_intervals_losses_revisions_and_counts(promoted):
    text = card_of(promoted, champion=[1.0] * 80 + [0.0] * 20).text
    margin = 1.98422 * 0.03  # Student's t, as 0.03 is not the error of 90 right answers
    assert f"| sums.exact_match | 0.9000 | {0.9 - margin:.4f} to {0.9 + margin:.4f} | 100 |" in text
    assert re.search(
        r"Compared with champion \(version 3\)[\s\S]*\| sums\.exact_match \| 100 \| 0 \| 0\.9000 \| 0\.8000", text
    )
    assert "| kl_nats_per_token | 0.0021 |" in text
    assert "hf://owner/base@main | `aaaaaaaaaaaa` | apache-2.0 |" in text
    assert "| rows-licence | 0.00 MiB | `sft` (120 documents, 40 rows, 9000 tokens), `awq` |" in text
    assert re.search(
        r"method sft.*learning_rate 0\.003, steps 500, global_batch_size 8.*layout DP1.*media_sha256 c{64}"
        r".*num_different_pictures 7",
        text,
    )


@pytest.mark.parametrize(
    ("base_card", "stated", "shown"),
    [
        ("# no metadata", None, None),
        ("---\nlicense: [broken\n---\n", None, None),
        ("---\nlicense: '| x |\\n# mine'\n---\n", None, None),
        ("---\nlicense: other\nlicense_name: llama3.1\nlicense_link: LICENSE\n---\n", None, "other"),
        ("# no metadata", "mit", "mit"),
    ],
)
def test_a_licence_is_stated_or_said_to_be_unknown(promoted, monkeypatch, base_card, stated, shown):
    monkeypatch.setattr(published, "BASE_CARD", base_card)
    found = card_of(promoted, license=stated)
    assert found.data.license == shown
    assert ("Its licence is not stated" in found.text) == (shown is None)
    assert "# mine" not in found.text
    if shown == "other":
        assert (found.data.license_name, found.data.license_link) == ("llama3.1", "LICENSE")


def test_files_of_this_machine_are_not_named(promoted, monkeypatch, tmp_path):
    write_result = published._write_result

    def from_here(work, result):
        tags = {"source": f"file://{tmp_path}/secret", "revision": "c" * 64} if "source" in result.tags else result.tags
        write_result(work, result.model_copy(update={"tags": tags}))

    monkeypatch.setattr(published, "_write_result", from_here)
    found = card_of(promoted)
    assert str(tmp_path) not in found.content
    assert "files of its maker | `cccccccccccc`" in found.text
    assert found.data.base_model is None


def test_the_same_records_give_the_same_card(promoted):
    refresh = promoted("file:///srv/adder", dry_run=True)
    refresh.publish()
    first = refresh.card
    refresh.publish()
    assert refresh.card == first
