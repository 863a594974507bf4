"""Rows in languages that are not wanted, identified by py3langid: naive Bayes over bytes, offline and deterministic.

After Lui and Baldwin 2012, langid.py: An Off-the-shelf Language Identification Tool.
"""

from __future__ import annotations

from stages.data.any_rows import ReadRow
from stages.kinds.curate.config import Language

LONGEST_CHARACTERS = 4000
"""Of a row that are looked at: more tell nothing new, and take long."""
FEWEST_LETTER_BYTES = 20
"""In UTF-8, where languages that say more with a letter have longer ones. Of less nobody could tell the language."""


class LanguageFilter:
    """Tells the language of one row after the other."""

    def __init__(self, config: Language) -> None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier  # takes a second

        self._config = config
        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def reason(self, row: ReadRow) -> str | None:
        """To leave out a row that is not in one of the languages with enough probability; None for one that says too
        little to tell."""
        text = "\n".join(text for texts in row.parts for text in texts)[:LONGEST_CHARACTERS]
        if len("".join(filter(str.isalpha, text)).encode()) < FEWEST_LETTER_BYTES:
            return None
        ranked = self._identifier.rank(text)
        wanted = sum(probability for language, probability in ranked if language in self._config.keep)
        if wanted >= self._config.min_probability:
            return None
        language, probability = ranked[0]
        return (
            f"is {language} with probability {probability:.2f}, and {' or '.join(self._config.keep)} with "
            f"{wanted:.2f}, less than {self._config.min_probability:g}"
        )
