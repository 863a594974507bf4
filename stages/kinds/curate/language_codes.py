"""The languages that can be identified: light, since every recipe is read with it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

_CODES = """
ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu ext fa fi fo fr fuv fy
ga gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig is it ja jv ka kab kik kk km kn ko ku ky la lb lg
lij ln lo lt ltg lv mg mk ml mn mr ms mt my ne nl nn no nso oc om or pa pcm pl ps pt qu ro ru rw sa sdh se si sk sl
sn so sq sr st sv sw ta te tg th tk tl tr tt ug uk ur uz uzs vec vi vo wa wuu xh yo yue zh zu zxx
"""
LANGUAGES = frozenset(_CODES.split())
"""ISO 639 codes that the library tells apart; zxx is no language. Listed, since to ask the library takes a second."""


def _known_language(code: str) -> str:
    if code not in LANGUAGES:
        raise ValueError(
            f"found {code!r}, expected an ISO 639 code such as en, de or zh: {', '.join(sorted(LANGUAGES))}"
        )
    return code


LanguageCode = Annotated[str, AfterValidator(_known_language)]
