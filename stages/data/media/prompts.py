"""Prompts with pictures of a dataset's rows, by which a server shows that it renders them as training did."""

from stages.core.fields import StrictModel
from stages.data.media_reference import MediaReference
from stages.models.recorded import ToolPrompt

MOST_PROMPTS = 8
"""Number of a dataset's prompts with pictures that are recorded with a trained model."""


class PicturePrompt(StrictModel):
    """Prompt of a row with the references of its pictures, for which addresses stand once it is recorded."""

    prompt: ToolPrompt
    media: tuple[MediaReference, ...]
