"""The instructions of IFEval (Zhou et al., 2023), a check each: `check(response, **kwargs)`.

The kwargs are the data set's. Keywords are texts here, not regular expressions.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache

from langdetect import detector_factory
from langdetect.lang_detect_exception import LangDetectException

from slime_rewards.ifbench.text import BULLET, compare, count_word, paragraphs, sentences, words

CHECKS: dict[str, Callable[..., bool]] = {}
_PROFILES = threading.Lock()
_MAX_DETECTED = 5000


def instruction(
    ident: str, checks: dict[str, Callable[..., bool]]
) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Register a check."""

    def register(check: Callable[..., bool]) -> Callable[..., bool]:
        checks[ident] = check
        return check

    return register


# -- keywords, letters, words ------------------------------------------------------------------------------------------


@instruction("keywords:existence", CHECKS)
def _(response: str, keywords: Sequence[str]) -> bool:
    return all(keyword.lower() in response.lower() for keyword in keywords)


@instruction("keywords:frequency", CHECKS)
def _(response: str, keyword: str, frequency: int, relation: str) -> bool:
    return compare(response.lower().count(keyword.strip().lower()), relation, frequency)


@instruction("keywords:forbidden_words", CHECKS)
def _(response: str, forbidden_words: Sequence[str]) -> bool:
    return not any(count_word(word, response) for word in forbidden_words)


@instruction("keywords:letter_frequency", CHECKS)
def _(response: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compare(response.lower().count(letter.strip().lower() or letter), let_relation, let_frequency)


@instruction("change_case:capital_word_frequency", CHECKS)
def _(response: str, capital_frequency: int, capital_relation: str) -> bool:
    return compare(sum(word.isupper() for word in words(response)), capital_relation, capital_frequency)


@instruction("change_case:english_capital", CHECKS)
def _(response: str) -> bool:
    return response.isupper() and language(response) == "en"


@instruction("change_case:english_lowercase", CHECKS)
def _(response: str) -> bool:
    return response.islower() and language(response) == "en"


@instruction("language:response_language", CHECKS)
def _(response: str, language: str) -> bool:
    return detected(response, language)


# -- lengths -----------------------------------------------------------------------------------------------------------


@instruction("length_constraints:number_sentences", CHECKS)
def _(response: str, num_sentences: int, relation: str) -> bool:
    return compare(len(sentences(response)), relation, num_sentences)


@instruction("length_constraints:number_words", CHECKS)
def _(response: str, num_words: int, relation: str) -> bool:
    return compare(len(words(response)), relation, num_words)


@instruction("length_constraints:number_paragraphs", CHECKS)
def _(response: str, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", response)
    parts = parts[not parts[0].strip() : len(parts) - (not parts[-1].strip())]
    return len(parts) == num_paragraphs and all(part.strip() for part in parts)


@instruction("length_constraints:nth_paragraph_first_word", CHECKS)
def _(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    found = paragraphs(response)
    if len(found) != num_paragraphs or not 1 <= nth_paragraph <= len(found):
        return False
    return (words(found[nth_paragraph - 1]) or [""])[0].lower() == first_word.lower()


# -- content and format ------------------------------------------------------------------------------------------------


@instruction("detectable_content:number_placeholders", CHECKS)
def _(response: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]+\]", response)) >= num_placeholders


@instruction("detectable_content:postscript", CHECKS)
def _(response: str, postscript_marker: str) -> bool:
    letters = [re.escape(c) for c in postscript_marker.strip().upper() if c.isalnum()]
    marker = r"\.?\s?".join(letters)
    return bool(re.search(rf"^[^\S\n]*{marker}\b\.?:?\s*\S", response, re.IGNORECASE | re.MULTILINE))


@instruction("detectable_format:number_bullet_lists", CHECKS)
def _(response: str, num_bullets: int) -> bool:
    return len(BULLET.findall(response)) == num_bullets


@instruction("detectable_format:constrained_response", CHECKS)
def _(response: str) -> bool:
    return any(answer in response for answer in ("My answer is yes.", "My answer is no.", "My answer is maybe."))


@instruction("detectable_format:number_highlighted_sections", CHECKS)
def _(response: str, num_highlights: int) -> bool:
    bold = re.findall(r"\*\*[^\S\n]*[^\s*][^\n*]*\*\*", response)
    rest = re.sub(r"\*\*[^\n*]*\*\*", "", response)
    return len(bold) + len(re.findall(r"\*[^\S\n]*[^\s*][^\n*]*\*", rest)) >= num_highlights


@instruction("detectable_format:multiple_sections", CHECKS)
def _(response: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


@instruction("detectable_format:json_format", CHECKS)
def _(response: str) -> bool:
    text = re.sub(r"\A```(?:json)?\s*\n?|\n?\s*```\Z", "", response.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@instruction("detectable_format:title", CHECKS)
def _(response: str) -> bool:
    return any(title.strip("<> \t") for title in re.findall(r"(?<!<)<<[^\n]+?>>", response))


@instruction("punctuation:no_comma", CHECKS)
def _(response: str) -> bool:
    return not re.search("[,\uff0c\u060c]", response)


# -- combinations, beginning and end -----------------------------------------------------------------------------------


@instruction("combination:two_responses", CHECKS)
def _(response: str) -> bool:
    parts = response.split("******")
    parts = parts[not parts[0].strip() : len(parts) - (not parts[-1].strip())] if len(parts) > 1 else parts
    return len(parts) == 2 and all(p.strip() for p in parts) and parts[0].strip() != parts[1].strip()


@instruction("combination:repeat_prompt", CHECKS)
def _(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@instruction("startend:end_checker", CHECKS)
def _(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().strip('"').lower())


@instruction("startend:quotation", CHECKS)
def _(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] in '"\u201c' and text[-1] in '"\u201d'


# -- language ----------------------------------------------------------------------------------------------------------


def detected(response: str, expected: str) -> bool:
    """Whether langdetect takes the text for that language; `zh` stands for both scripts."""
    found = language(response)
    return found == expected or (found or "").partition("-")[0] == expected


def language(text: str) -> str | None:
    """ISO 639-1 code that langdetect gives, the same one every time; None for a text without features (numbers)."""
    detector = _profiles().create()
    detector.seed = 0
    detector.append(text[:_MAX_DETECTED].lower())
    try:
        return str(detector.detect())
    except LangDetectException:
        return None


def _profiles() -> detector_factory.DetectorFactory:
    with _PROFILES:  # its own loading is not safe when several threads come first
        return _loaded()


@lru_cache(maxsize=1)
def _loaded() -> detector_factory.DetectorFactory:
    detector_factory.init_factory()
    return detector_factory._factory
