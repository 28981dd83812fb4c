"""IFBench's instructions about words and sentences (Pyatkin et al., 2025), a check each: `check(response, **kwargs)`.

The kwargs are the data set's. "at least N" and "exactly N" differ from instruction to instruction as the data set words
them.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable

from slime_rewards.ifbench.ifeval import instruction
from slime_rewards.ifbench.text import count_word, lines, paragraphs, sentences, words

CHECKS: dict[str, Callable[..., bool]] = {}

_CONJUNCTIONS = frozenset({"and", "but", "for", "nor", "or", "so", "yet"})
_PRONOUNS = frozenset(
    {
        "i", "me", "my", "mine", "myself", "you", "your", "yours", "yourself", "yourselves", "he", "him", "his",
        "himself", "she", "her", "hers", "herself", "it", "its", "itself", "we", "us", "our", "ours", "ourselves",
        "they", "them", "their", "theirs", "themselves", "this", "that", "these", "those", "who", "whom", "whose",
        "which", "what", "whoever", "whomever", "whatever", "whichever", "anybody", "anyone", "anything", "everybody",
        "everyone", "everything", "nobody", "nothing", "somebody", "someone", "something", "each", "either", "neither",
        "both", "all", "some", "any", "none",
    }
)  # fmt: skip
"""IFBench's: personal, possessive, reflexive, demonstrative, interrogative, indefinite."""
_VOWELS = frozenset("aeiou")
_CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
_KANA = re.compile("[\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f\u4e00-\u9fff]")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")


# -- counts ------------------------------------------------------------------------------------------------------------


@instruction("count:word_count_range", CHECKS)
def _(response: str, min_words: int, max_words: int) -> bool:
    return min_words <= len(words(response)) <= max_words


@instruction("count:unique_word_count", CHECKS)
def _(response: str, N: int) -> bool:
    return len(set(_lower(response))) >= N


@instruction("count:conjunctions", CHECKS)
def _(response: str, small_n: int) -> bool:
    return len(_CONJUNCTIONS & set(_lower(response))) >= small_n


@instruction("count:pronouns", CHECKS)
def _(response: str, N: int) -> bool:
    found = (re.split("['\u2019]", word)[0] for word in _lower(response))  # "it's" is a pronoun and a verb
    return sum(word in _PRONOUNS for word in found) >= N


@instruction("count:numbers", CHECKS)
def _(response: str, N: int) -> bool:
    return len(_NUMBER.findall(response)) == N


@instruction("count:punctuation", CHECKS)
def _(response: str) -> bool:
    rest = re.sub(r"\?!|!\?|\u203d", "", response)
    return rest != response and all(mark in rest for mark in ".,!?;:")


@instruction("count:words_japanese", CHECKS)
def _(response: str, N: int) -> bool:
    tokens = response.split()
    return len(tokens) >= N and all(bool(_KANA.search(t)) for t in tokens[N - 1 :: N])


@instruction("count:keywords_multiple", CHECKS)
def _(response: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str) -> bool:
    wanted = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7))
    return all(count_word(keyword, response) == times for keyword, times in wanted)


# -- ratios ------------------------------------------------------------------------------------------------------------


@instruction("ratio:sentence_type", CHECKS)
def _(response: str) -> bool:
    kinds = _kinds(response)
    return kinds["?"] > 0 and kinds["."] == 2 * kinds["?"]


@instruction("ratio:sentence_balance", CHECKS)
def _(response: str) -> bool:
    kinds = _kinds(response)
    return kinds["."] == kinds["?"] == kinds["!"] > 0


@instruction("ratio:overlap", CHECKS)
def _(response: str, reference_text: str, percentage: int) -> bool:
    given, reference = (set(zip(text, text[1:], text[2:])) for text in (_lower(response), _lower(reference_text)))
    return bool(given) and abs(100 * len(given & reference) / len(given) - percentage) <= 2


@instruction("ratio:sentence_words", CHECKS)
def _(response: str) -> bool:
    found = sentences(response)
    used = [word for sentence in found for word in set(_lower(sentence))]
    return len(found) == 3 and len({len(s) for s in found}) == 1 and len(used) == len(set(used))


# -- every word --------------------------------------------------------------------------------------------------------


@instruction("words:alphabet", CHECKS)
def _(response: str) -> bool:
    first = [word[0] for word in _lower(response)]
    if not first or not all("a" <= letter <= "z" for letter in first):
        return False
    return all((ord(b) - ord(a)) % 26 == 1 for a, b in itertools.pairwise(first))


@instruction("words:vowel", CHECKS)
def _(response: str) -> bool:
    found = paragraphs(response)
    return len(found) == 1 and len(_VOWELS & set(response.lower())) <= 3


@instruction("words:consonants", CHECKS)
def _(response: str) -> bool:
    found = _lower(response)
    return bool(found) and all(_CLUSTER.search(word) for word in found)


@instruction("words:palindrome", CHECKS)
def _(response: str) -> bool:
    return sum(len(w) >= 5 and w == w[::-1] for w in _lower(response)) >= 10


@instruction("words:prime_lengths", CHECKS)
def _(response: str) -> bool:
    found = words(response)
    return bool(found) and all(_prime(sum(c.isalnum() for c in word)) for word in found)


@instruction("words:repeats", CHECKS)
def _(response: str, small_n: int) -> bool:
    return max(Counter(_lower(response)).values(), default=0) <= small_n


@instruction("words:no_consecutive", CHECKS)
def _(response: str) -> bool:
    return all(a[0] != b[0] for a, b in itertools.pairwise(_lower(response)))


@instruction("words:words_position", CHECKS)
def _(response: str, keyword: str) -> bool:
    found = _lower(response)
    return len(found) >= 4 and found[1] == found[-2] == keyword.strip().lower()


@instruction("words:keywords_specific_position", CHECKS)
def _(response: str, keyword: str, n: int, m: int) -> bool:
    found = sentences(response)
    inside = _lower(found[n - 1]) if 1 <= n <= len(found) else []
    return 1 <= m <= len(inside) and inside[m - 1] == keyword.strip().lower()


# -- sentences and paragraphs ------------------------------------------------------------------------------------------


@instruction("words:last_first", CHECKS)
def _(response: str) -> bool:
    found = [_lower(sentence) for sentence in sentences(response)]
    return len(found) > 1 and all(a[-1] == b[0] for a, b in itertools.pairwise(found))


@instruction("words:paragraph_last_first", CHECKS)
def _(response: str) -> bool:
    found = [_lower(line) for line in lines(response)]
    return bool(found) and all(words_ and words_[0] == words_[-1] for words_ in found)


@instruction("sentence:keyword", CHECKS)
def _(response: str, word: str, N: int) -> bool:
    found = sentences(response)
    return 1 <= N <= len(found) and count_word(word, found[N - 1]) > 0


@instruction("sentence:increment", CHECKS)
def _(response: str, small_n: int) -> bool:
    counts = [len(words(sentence)) for sentence in sentences(response)]
    return len(counts) > 1 and all(b - a == small_n for a, b in itertools.pairwise(counts))


@instruction("sentence:alliteration_increment", CHECKS)
def _(response: str) -> bool:
    runs = [_longest_alliteration(_lower(sentence)) for sentence in sentences(response)]
    return len(runs) > 1 and all(a < b for a, b in itertools.pairwise(runs))


@instruction("custom:sentence_alphabet", CHECKS)
def _(response: str) -> bool:
    first = [_lower(sentence)[0][0] for sentence in sentences(response)]
    return first == [chr(ord("a") + i) for i in range(26)]


@instruction("custom:word_reverse", CHECKS)
def _(response: str) -> bool:
    found = " ".join(reversed(_lower(response)))
    return "bald eagle" in found


@instruction("custom:character_reverse", CHECKS)
def _(response: str) -> bool:
    return "bald eagle" in response.strip()[::-1].lower()


def _lower(text: str) -> list[str]:
    return [word.lower() for word in words(text)]


def _prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _kinds(text: str) -> Counter[str]:
    """How many sentences end in a full stop, a question mark, an exclamation mark."""
    return Counter(re.sub(r"[^.!?]", "", sentence[-4:])[-1:] for sentence in sentences(text))


def _longest_alliteration(found: list[str]) -> int:
    return max((len(list(run)) for _, run in itertools.groupby(word[0] for word in found)), default=0)
