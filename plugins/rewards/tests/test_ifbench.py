from __future__ import annotations

import json
import string
import time
from typing import Any

import pytest
from slime_rewards.ifbench import CHECKS, NOT_CHECKED, reward

from slime_core import Sample
from slime_core.config import Args
from tests.sweeps import sweep

CSV = "ID,Country,City,Year,Count\n" + "1,France,Paris,2020,3\n" * 7
TABS = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + '"1"\t"Art"\t"A"\t"S1"\t"9"\n' * 3
SPECIAL = "ProductID,Category,Brand,Price,Stock\n" + "1,Toy,Acme,2,3\n" * 13 + '1,"T&y!",Acme,2,3'
PALINDROMES = "level radar civic refer rotor kayak madam tenet sagas stats"
MCQ = "\n".join(f"Question {n}: {'why ' * n}?\nA) a\nB) b\nC) c\nD) d\nE) e" for n in range(1, 5))
ALPHABET = " ".join(f"{letter.upper()}nd then it went on." for letter in string.ascii_lowercase)
FRENCH = "Le petit chat dort sur la chaise pendant que nous mangeons dans la cuisine."
ENGLISH = "The little cat sleeps on the chair while we are eating in the kitchen."

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    # id, kwargs, follows, does not
    ("keywords:existence", {"keywords": ["Sea", "c++"]}, "the SEA in C++", "the sea"),
    ("keywords:existence", {"keywords": "['Sea', 'c++']"}, "the SEA in C++", "the sea"),
    ("keywords:existence", {"keywords": "sea"}, "the Sea", "a s e"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "A a", "a"),
    ("keywords:frequency", {"keyword": "7", "frequency": "2", "relation": "At least "}, "7 7", "7"),
    ("keywords:forbidden_words", {"forbidden_words": ["art"]}, "the party", "modern Art!"),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 3, "let_relation": "at least"}, "eEe", "ee"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "I AM", "I am"),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_capital", {}, ENGLISH.upper(), FRENCH.upper()),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), ENGLISH),
    ("language:response_language", {"language": "fr"}, FRENCH, ENGLISH),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two!", "Dr. No."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "well-known fact", "a b c"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\na\n***\nb\n", "a\n***\n***\nb"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
     "a\n\n*So*, b", "so\n\nb"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name] at []"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hi\nP.S. bye", "Hi\nPSI"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     "SECTION 1\na\nSECTION 2\nb", "SECTION 1\na\nSECTION b"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{'a': 1}"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >> text"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. hi", "hi"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'and so.\n"The END."', "The end. Or not"),
    ("startend:quotation", {}, ' "a" ', '"a'),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "a b c", "a b c d"),
    ("count:unique_word_count", {"N": 2}, "a b", "a A"),
    ("count:conjunctions", {"small_n": 2}, "this and that or", "and and"),
    ("count:pronouns", {"N": 2}, "I see her", "I see"),
    ("count:pronouns", {"N": 2}, "It's what she\u2019s", "Let's go"),
    ("count:numbers", {"N": 2}, "1,000 and -2.5", "3 of 4 in 5"),
    ("count:punctuation", {}, "a, b; c: d. e! f? g?!", "a, b; c: d. e! f?"),
    ("count:words_japanese", {"N": 2}, "a \u3042 b \u30a2 c", "a \u3042 b c"),
    ("count:keywords_multiple", {f"keyword{i}": k for i, k in enumerate("vwxyz", 1)},
     "v " + "w " * 2 + "x " * 3 + "y " * 5 + "z " * 7, "v w x y z"),
    ("count:keywords_multiple", {f"keyword{i}": k for i, k in enumerate(["p q", *"wxyz"], 1)},
     "p q " + "w " * 2 + "x " * 3 + "y " * 5 + "z " * 7, "w " * 2 + "x " * 3 + "y " * 5 + "z " * 7),
    ("ratio:sentence_type", {}, "A b. C d. E f?", "A b. C d?"),
    ("ratio:sentence_balance", {}, "A b. C d? E f!", "A b. C d? E f?"),
    ("ratio:overlap", {"reference_text": "a b c d", "percentage": 50}, "a b c x", "x y z"),
    ("ratio:sentence_words", {}, "One red fox. Two big owl. Six old elk.", "One red fox. One big owl. Six old elk."),
    ("words:alphabet", {}, "yes zebras are big", "yes zebras big"),
    ("words:vowel", {}, "a bit of it", "a bit of elf u"),
    ("words:consonants", {}, "string lamp", "string of"),
    ("words:palindrome", {}, PALINDROMES, PALINDROMES[6:]),
    ("words:prime_lengths", {}, "to the seven", "to be four"),
    ("words:repeats", {"small_n": 2}, "a a b", "a a A"),
    ("words:no_consecutive", {}, "big red bus", "big bus"),
    ("words:words_position", {"keyword": "sea"}, "the sea is the sea now", "sea the is the sea now"),
    ("words:keywords_specific_position", {"keyword": "sea", "n": 2, "m": 2}, "One. The sea is.", "The sea. One two."),
    ("words:last_first", {}, "I like cats. Cats like me.", "I like cats. Dogs do."),
    ("words:paragraph_last_first", {}, "Here I am here.\nSo be it so", "Here I am.\nSo"),
    ("sentence:keyword", {"word": "sea", "N": 2}, "One. The SEA.", "The sea. One."),
    ("sentence:keyword", {"word": "eat", "N": 1}, "We eat, then go.", "The great wall stands."),
    ("sentence:increment", {"small_n": 1}, "One two. One two three. One two three four.", "One two. One two."),
    ("sentence:alliteration_increment", {}, "One two. Big bad cat. Six silly swans.", "Big bad. Six sly."),
    ("custom:sentence_alphabet", {}, ALPHABET, ALPHABET[8:]),
    ("custom:word_reverse", {}, "eagle bald the is It", "It is the bald eagle"),
    ("custom:character_reverse", {}, "elgaE dlaB eht", "Bald Eagle"),
    ("format:parentheses", {}, "a (b [c {d (e [f])}])", "(((( ) ) ) ) ("),
    ("format:quotes", {}, "\"a 'b \"c\" d' e\"", "\"a 'b' c\""),
    ("format:quote_unquote", {}, 'He said "hi", which is kind.', 'He said "hi".'),
    ("format:emoji", {}, "Hello there \U0001f600. Bye now! \U0001f44d\U0001f3fd", "Hello \U0001f600. Bye."),
    ("format:no_whitespace", {}, "oneword", "two words"),
    ("format:title_case", {}, "The Old Man and the Sea", "The old Man"),
    ("format:newline", {}, "one\nword\n", "one word"),
    ("format:line_indent", {}, "a\n b\n  c", "a\n b\n c"),
    ("format:list", {"sep": "!?!?"}, "!?!? a\n!?!? b", "- a\n- b"),
    ("format:sub-bullets", {}, "* a\n  - b\n* c\n  - d", "* a\n  - b\n* c"),
    ("format:no_bullets_bullets", {}, "One. Two.\n* a\n* b", "One.\n* a\n* b"),
    ("format:thesis", {}, "<i>Thesis.</i> more\n\n<em>Two</em> x", "<i>Thesis.</i> more\n\nTwo"),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "perhaps"),
    ("format:output_template", {}, "My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a My Conclusion: b"),
    ("repeat:repeat_change", {"prompt_to_repeat": "Say hi now"}, "Tell hi now", "Say hi now"),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.", "Sure!"),
    ("repeat:repeat_span", {"prompt_to_repeat": "a bc  d e", "n_start": 1, "n_end": 2}, "BC d", "c"),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c", "n_start": 0, "n_end": 2}, "a b\nc", "a b"),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "7, 14, 21, 28, 35, 42, 49"),
    ("custom:mcq_count_length", {}, MCQ, MCQ.replace("E) e", "")),
    ("custom:csv_city", {}, CSV, CSV + "2,a,b,c,d"),
    ("custom:csv_special_character", {}, SPECIAL, SPECIAL.replace('"', "")),
    ("custom:csv_quotes", {}, TABS, TABS.replace('"9"', "9")),
    ("custom:date_format_list", {}, "1796-04-12, 1805-12-02", "12 April 1796"),
]  # fmt: skip


def sample(response: str, ids: list[str], kwargs: Any, **more: Any) -> Sample:
    return Sample(response=response, metadata={"instruction_id_list": ids, "kwargs": kwargs}, **more)


@sweep("ident, kwargs, follows, does_not", CASES)
def test_instruction(ident: str, kwargs: dict[str, Any], follows: str, does_not: str) -> None:
    others = {"some_other_instructions": None}
    assert reward(None, sample(follows, [ident], [{**kwargs, **others}])) == 1.0
    assert reward(None, sample(does_not, [ident], [kwargs])) == 0.0


def test_every_instruction_has_a_case_and_the_benchmarks_are_complete() -> None:
    assert {case[0] for case in CASES} == set(CHECKS)
    assert len(CHECKS) == 25 + 58 - len(NOT_CHECKED)
    assert not set(CHECKS) & set(NOT_CHECKED)


def test_all_must_be_followed_unless_a_fraction_is_wanted() -> None:
    ids, kwargs = ["punctuation:no_comma", "startend:quotation"], [{}, {}]
    share = Args(plugins={"ifbench": {"score": "fraction"}})
    assert reward(None, sample("a", ids, kwargs)) == 0.0
    assert reward(share, sample("a", ids, kwargs)) == 0.5
    assert reward(None, sample('"a"', ids, kwargs)) == 1.0


def test_loose_forgives_an_introduction_a_farewell_and_asterisks() -> None:
    ids, loose = ["startend:quotation"], Args(plugins={"ifbench": {"loose": True}})
    text = 'Sure, here it is:\n*"a"*\nBye!'
    assert reward(None, sample(text, ids, [{}])) == 0.0
    assert reward(loose, sample(text, ids, [{}])) == 1.0


@pytest.mark.parametrize(
    "label",
    [
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        json.dumps({"instruction_id_list": ["punctuation:no_comma"], "kwargs": "[{}]"}),
        json.dumps([{"instruction_id": ["punctuation:no_comma"], "kwargs": [None]}]),
        {"instruction_id": " Punctuation:No_Comma", "kwargs": {}},
        "[{'instruction_id': ['punctuation:no_comma'], 'kwargs': [None]}]",
        '["{\\"instruction_id\\": [\\"punctuation:no_comma\\"], \\"kwargs\\": [null]}"]',
        {"instruction_id_list": "['punctuation:no_comma']", "kwargs": ["{'num_words': None}"]},
    ],
)
def test_the_label_may_hold_them(label: Any) -> None:
    assert reward(None, Sample(response="a", label=label)) == 1.0
    assert reward(None, Sample(response="a, b", label=label)) == 0.0


@pytest.mark.parametrize(
    "label",
    ["not json at all", '{"func_name": "verify_keywords", "N": null}', "42", 42, [1, 2], [], "[]",
     {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [7]}, {"kwargs": [{}]}],
)  # fmt: skip
def test_a_label_that_cannot_be_read_fails_the_sample(label: Any) -> None:
    with pytest.raises(ValueError, match=r"no instructions|must be a mapping"):
        reward(None, Sample(response="a", label=label))


def test_reasoning_and_end_tokens_are_not_judged() -> None:
    ids = ["punctuation:no_comma", "startend:end_checker"]
    kwargs = [{}, {"end_phrase": "bye"}]
    assert reward(None, sample("<think>well, well</think> bye <|im_end|>", ids, kwargs)) == 1.0
    assert reward(None, sample("<think></think> ", ["punctuation:no_comma"], [{}])) == 0.0


@pytest.mark.parametrize(
    ("ids", "kwargs", "message"),
    [
        (["punctuation:no_coma"], [{}], "'punctuation:no_coma' is unknown; known: .*punctuation:no_comma"),
        (["words:start_verb"], [{}], "'words:start_verb' is not implemented"),
        (
            ["keywords:existence"],
            [{}],
            r"'keywords:existence' with kwargs \{\}: missing a required argument: 'keywords'",
        ),
        (["punctuation:no_comma"], [{"n": 1}], "unexpected keyword argument 'n'"),
        (["punctuation:no_comma"], [], "same length"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1, "relation": "about"}], "relation 'about'"),
    ],
)
def test_wrong_instructions_are_the_data_sets_fault(ids: list[str], kwargs: list[Any], message: str) -> None:
    if kwargs == []:
        kwargs = [{}, {}]
    with pytest.raises(ValueError, match=message):
        reward(None, sample("a", ids, kwargs))


@pytest.mark.parametrize("text", ["(", "a ", "*", "\n", ".", '"', pytest.param("1.\n", marks=pytest.mark.slow), "<"])
def test_long_text_takes_no_time(text: str) -> None:
    text = f"**{text * 15_001}x"
    for ident, kwargs, _, _ in CASES:
        started = time.process_time()
        reward(None, sample(text, [ident], [kwargs]))
        assert time.process_time() - started < 2, ident
