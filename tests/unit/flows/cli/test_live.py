"""What a terminal shows of a running stage."""

from flows.cli.live import metrics_text


def test_utilization_is_a_percentage_and_large_numbers_have_no_fraction():
    assert metrics_text({"loss": 0.01234, "tokens_per_s": 8012.4, "mfu": 0.4026}) == (
        "loss 0.01234  tokens_per_s 8,012  mfu 40.3%"
    )
