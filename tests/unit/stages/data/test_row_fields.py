"""A row with `label: false` is refused as a bad answer; one with a classification label of 0 is not."""

import pytest

from stages.data.messages import RowError
from stages.data.row_fields import check_row


@pytest.mark.parametrize("label", [False, "false", "False"])
def test_a_bad_answer_is_refused(label):
    with pytest.raises(RowError, match="has `label: false`"):
        check_row({"text": "a", "label": label}, ("text",))


@pytest.mark.parametrize("label", [0, 1, True, None, "neg"])
def test_a_class_is_left_alone(label):
    check_row({"text": "a", "label": label}, ("text",))
