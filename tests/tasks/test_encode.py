"""Token ids: golden ones of SmolLM2, cutting of passages, and tokenizers with habits of their own."""

from __future__ import annotations

from dataclasses import replace
from string import ascii_letters
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bayeslora.errors import InputError
from bayeslora.tasks import SPLITS, EncodedItem, Item, Prompt, encode_item, encode_items, load_task
from bayeslora.tasks.boolq import read_boolq
from bayeslora.tasks.choices import choice_candidate, read_choices
from bayeslora.tasks.encode import beginning_ids
from bayeslora.tasks.labelled import labelled_item
from bayeslora.tasks.winogrande import read_winogrande

from .cases import boolq_row
from .test_golden import ARC_EASY, ARC_NUMBERS, BOOLQ, OPENBOOKQA, WINOGRANDE

LONG = 'Rome wasn\'t built in 1 day, naïve 中文字 🙂🙂 said: "it took longer". ' * 40

slow_machine = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize(
    "item, prompt_start, option_ids",
    [
        (read_choices(ARC_EASY).item, [17872, 42, 16621, 3139, 359], [[3118, 7600], [1114], [3542], [913]]),
        (
            read_choices(OPENBOOKQA).item,
            [17872, 42, 378, 2388, 314, 3358, 327, 198, 23084, 42, 198, 49, 30],
            [
                [31478, 1380, 725, 16901],
                [1122, 2969, 614, 284, 2967, 1573],
                [5504, 34324, 862, 281, 253, 40985],
                [2109, 45549, 28, 28447, 284, 34324, 862],
            ],
        ),
        (
            read_winogrande(WINOGRANDE).item,
            [57, 276, 36870, 288, 3134, 32286, 506, 1800, 28630, 990, 2221, 1953, 253, 12505, 975],
            [[27106, 25869, 1718, 3801, 16383, 30], [32286, 25869, 1718, 3801, 16383, 30]],
        ),
        (read_boolq(BOOLQ).item, [], [[9230], [2838]]),
    ],
)
def test_golden_ids(smollm2: Any, item: Item, prompt_start: list[int], option_ids: list[list[int]]) -> None:
    encoded = encode_item(item, smollm2, "text")
    assert encoded.prompt_ids[: len(prompt_start)] == prompt_start
    assert encoded.option_ids == option_ids
    assert smollm2.decode(encoded.prompt_ids) == item.prompt.text
    assert tuple(smollm2.decode(ids) for ids in encoded.option_ids) == item.options


def test_letters(smollm2: Any) -> None:
    encoded = encode_item(read_choices(ARC_EASY).item, smollm2, "letter")
    assert encoded.option_ids == [[330], [389], [340], [422]]
    assert encoded.prompt_ids[-2:] == [21350, 42]


@pytest.mark.parametrize("item", [read_boolq(BOOLQ).item, read_winogrande(WINOGRANDE).item])
def test_letters_of_questions_whose_prompt_shows_none(smollm2: Any, item: Item) -> None:
    encoded = encode_item(item, smollm2, "letter")
    assert encoded.option_ids == [[330], [389]] and item.letter_prompt is not None
    assert smollm2.decode(encoded.prompt_ids) == item.letter_prompt.text != item.prompt.text


def test_many_options_are_answered_by_label_only_where_the_prompt_lists_them(smollm2: Any) -> None:
    names = [f"kind {k}" for k in range(30)]
    listed = choice_candidate("q", "Which?", names, list(ascii_letters[:30]), 3).item
    assert len(encode_item(listed, smollm2, "letter").option_ids) == 30
    with pytest.raises(InputError, match=r"'x': it has 30 options, which its prompt does not list.*use scoring 'text'"):
        encode_item(replace(labelled_item("x", "a text", names), labels=listed.labels), smollm2, "letter")
    assert encode_item(labelled_item("x", "a text", names[:26]), smollm2, "letter").option_ids[25]


def test_a_passage_is_cut_where_letters_answer_too(smollm2: Any) -> None:
    item = read_boolq(boolq_row(passage=LONG)).item
    encoded = encode_item(item, smollm2, "letter", max_tokens=100)
    text = smollm2.decode(encoded.prompt_ids)
    assert item.letter_prompt is not None and text.startswith("Passage:") and text.endswith(item.letter_prompt.tail)
    assert len(encoded.prompt_ids) + 1 <= 100


def test_what_labels_share_at_their_beginning_belongs_to_the_prompt(smollm2: Any) -> None:
    """SmolLM2 writes " 1" as a space and a digit."""
    encoded = encode_item(read_choices(ARC_NUMBERS).item, smollm2, "letter")
    assert encoded.option_ids == [[33], [34], [35], [36]]
    assert smollm2.decode(encoded.prompt_ids).endswith("\nAnswer: ")


def test_options_are_tokenised_as_they_would_be_alone(smollm2: Any) -> None:
    """The anchor changes nothing for byte-level tokenizers."""
    texts = (" Paris", " 12 cm", " the end.", ' "quoted"', " -5", " é", " $x$", " ...", " 中文", " ")
    item = Item("x", Prompt("?"), texts, tuple("abcdefghij"), None)
    assert encode_item(item, smollm2, "text").option_ids == [smollm2(text).input_ids for text in texts]


@pytest.mark.parametrize("max_tokens", [2000, 1024, 100, 40, 25])
def test_a_passage_is_cut_from_the_left(smollm2: Any, max_tokens: int) -> None:
    item = read_boolq(boolq_row(passage=LONG)).item
    encoded = encode_item(item, smollm2, "text", max_tokens=max_tokens)
    assert max_tokens - 16 < len(encoded.prompt_ids) + 1 <= max_tokens or max_tokens == 2000
    text = smollm2.decode(encoded.prompt_ids)
    assert text.startswith(item.prompt.head) and text.endswith(item.prompt.tail)
    left = text.removeprefix(item.prompt.head).removesuffix(item.prompt.tail)
    assert item.prompt.passage.endswith(left)
    assert encoded.option_ids == [[9230], [2838]]


@slow_machine
@given(st.text(alphabet="ab é中🙂.1\u0301", max_size=60), st.integers(15, 60))
def test_cuts_leave_whole_characters_and_fit(smollm2: Any, passage: str, max_tokens: int) -> None:
    item = read_boolq(boolq_row(passage=passage)).item
    encoded = encode_item(item, smollm2, "text", max_tokens=max_tokens)
    text = smollm2.decode(encoded.prompt_ids)
    assert len(encoded.prompt_ids) + 1 <= max_tokens
    assert text.startswith("Passage:") and text.endswith("\nQuestion: is rome flat\nAnswer:")
    assert item.prompt.text.endswith(text.removeprefix("Passage:"))


def test_what_fits_is_whole_and_what_does_not_fit_by_one_is_cut_by_one(smollm2: Any) -> None:
    item = read_boolq(BOOLQ).item
    whole = encode_item(item, smollm2, "text")
    assert whole.prompt_ids == smollm2(item.prompt.text).input_ids
    assert encode_item(item, smollm2, "text", max_tokens=len(whole.prompt_ids) + 1) == whole
    cut = encode_item(item, smollm2, "text", max_tokens=len(whole.prompt_ids))
    assert smollm2.decode(cut.prompt_ids) == item.prompt.text.replace(" All", "")


def failure(item: Item, tokenizer: Any, scoring: Any = "text", max_tokens: int = 1024) -> str:
    with pytest.raises(InputError) as error:
        encode_item(item, tokenizer, scoring, max_tokens)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_questions_that_do_not_fit(smollm2: Any) -> None:
    item = read_choices(ARC_EASY).item
    assert failure(item, smollm2, max_tokens=50) == (
        "item 'MCAS_2007_8_5189': question and options need 53 tokens without its passage, and at most 50 are allowed; "
        "allow more or leave it out"
    )
    assert failure(read_boolq(BOOLQ).item, smollm2, max_tokens=10).startswith(
        "item 'train-6081': question and options need 20 tokens without its passage, and at most 10 are allowed"
    )


def test_the_library_does_not_warn_of_what_is_cut_or_refused_here(smollm2: Any) -> None:
    import copy

    tokenizer = copy.deepcopy(smollm2)
    tokenizer.model_max_length, tokenizer.deprecation_warnings = 8, {}
    encode_items([read_boolq(BOOLQ).item], tokenizer, "text", 40)
    assert failure(read_choices(ARC_EASY).item, tokenizer, max_tokens=50)
    assert tokenizer.deprecation_warnings == {}


@pytest.mark.parametrize(("whole", "fits"), [(0, False), (52, False), (53, True), (400, True)])
def test_questions_that_stay_whole(smollm2: Any, whole: int, fits: bool) -> None:
    item = read_choices(ARC_EASY).item
    if fits:
        assert encode_item(item, smollm2, "text", 50, whole) == encode_item(item, smollm2, "text")
    else:
        with pytest.raises(InputError, match=f"need 53 tokens without its passage, and at most {max(50, whole)} are"):
            encode_item(item, smollm2, "text", 50, whole)


def test_a_passage_is_cut_however_much_may_stay_whole(smollm2: Any) -> None:
    item = read_boolq(BOOLQ).item
    assert encode_item(item, smollm2, "text", 40, 1000) == encode_item(item, smollm2, "text", 40)
    bare = encode_item(item, smollm2, "text", 10, 1000)
    assert bare == encode_item(item, smollm2, "text", 20) and len(bare.prompt_ids) < 20


def test_other_errors(smollm2: Any) -> None:
    item = read_choices(ARC_EASY).item
    assert failure(item, smollm2, "leter") == "unknown scoring 'leter'; choose text or letter (did you mean 'letter'?)"
    odd = replace(item, labels=("A", "B", "C", "Dodecahedron"))
    assert failure(odd, smollm2, "letter").startswith("item 'MCAS_2007_8_5189': label ' Dodecahedron' is ")
    assert failure(odd, smollm2, "letter").endswith(" tokens, and scoring by letter needs one; use scoring 'text'")
    assert failure(replace(item, prompt=Prompt("")), smollm2) == (
        "item 'MCAS_2007_8_5189': its prompt is empty; give it a text that the options can follow"
    )
    assert failure(replace(item, options=("", " b", " c", " d")), smollm2) == (
        "item 'MCAS_2007_8_5189': option '' has no tokens; give it a text"
    )


def sentencepiece_like() -> Any:
    """A tokenizer that puts a space in front of every text and knows a few words, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "▁", "▁:", "▁Yes", "▁No", "▁Answer", ":", "▁A"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0 - k) for k, piece in enumerate(pieces)], unk_id=0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_tokenizers_that_add_a_space_of_their_own() -> None:
    tokenizer = sentencepiece_like()
    assert tokenizer.tokenize(" Yes") == ["▁", "▁Yes"]
    item = Item("x", Prompt("Answer:"), (" Yes", " No"), ("Yes", "No"), 0)
    for scoring in ("text", "letter"):
        encoded = encode_item(item, tokenizer, scoring)  # type: ignore[arg-type]
        assert [tokenizer.convert_ids_to_tokens(ids) for ids in encoded.option_ids] == [["▁Yes"], ["▁No"]]
        assert tokenizer.convert_ids_to_tokens(encoded.prompt_ids) == ["▁Answer", ":"]


class Slow:
    """A tokenizer of characters that knows nothing of offsets."""

    is_fast = False

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> Any:
        assert not add_special_tokens
        return type("Encoding", (), {"input_ids": [ord(character) for character in text]})


def test_slow_tokenizers_work_until_something_must_be_cut() -> None:
    item = read_boolq(BOOLQ).item
    assert "".join(map(chr, encode_item(item, Slow(), "text").prompt_ids)) == item.prompt.text  # type: ignore[arg-type]
    assert failure(item, Slow(), max_tokens=100) == (
        "item 'train-6081': its passage is too long, and only a fast tokenizer can cut it; use one"
    )
    assert "need" in failure(read_choices(ARC_EASY).item, Slow(), max_tokens=10)


@pytest.mark.parametrize("split", SPLITS)
def test_urns_are_small_in_tokens(smollm2: Any, split: str) -> None:
    encoded = [encode_item(item, smollm2, "text") for item in load_task("urns").load(split)]
    assert max(len(one.prompt_ids) for one in encoded) < 64
    assert all(len(ids) == 1 for one in encoded for ids in one.option_ids)


def with_template(template: str, tokens: list[str]) -> Any:
    """The tokenizer above, with special tokens around every text."""
    from tokenizers import processors

    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    numbers = [(token, tokenizer.convert_tokens_to_ids(token)) for token in tokens]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=numbers)
    return tokenizer


@pytest.mark.parametrize(
    "template, tokens, beginning",
    [
        ("$A", [], []),
        ("<s> $A", ["<s>"], ["<s>"]),
        ("[gMASK] <sop> $A", ["[gMASK]", "<sop>"], ["[gMASK]", "<sop>"]),
        ("$A </s>", ["</s>"], []),
        ("<s> $A </s>", ["<s>", "</s>"], ["<s>"]),
    ],
)
def test_items_begin_as_the_tokenizer_begins_a_text_and_end_openly(
    template: str, tokens: list[str], beginning: list[str]
) -> None:
    tokenizer = with_template(template, tokens)
    assert tokenizer.convert_ids_to_tokens(beginning_ids(tokenizer)) == beginning
    item = Item("x", Prompt("Answer:"), (" Yes", " No"), ("Yes", "No"), 0)
    (encoded,) = encode_items([item], tokenizer, "text")
    assert tokenizer.convert_ids_to_tokens(encoded.prompt_ids) == [*beginning, "▁Answer", ":"]
    assert [tokenizer.convert_ids_to_tokens(ids) for ids in encoded.option_ids] == [["▁Yes"], ["▁No"]]
    assert encode_item(item, tokenizer, "text").prompt_ids == encoded.prompt_ids[len(beginning) :]


def test_the_prompt_and_its_answer_are_what_the_tokenizer_makes_of_the_whole_text() -> None:
    tokenizer = with_template("<s> $A", ["<s>"])
    item = Item("x", Prompt("Answer:"), (" Yes", " No"), ("Yes", "No"), 0)
    (encoded,) = encode_items([item], tokenizer, "text")
    for option, ids in zip(item.options, encoded.option_ids, strict=True):
        assert [*encoded.prompt_ids, *ids] == tokenizer(item.prompt.text + option).input_ids


def test_the_beginning_counts_among_the_tokens_allowed() -> None:
    tokenizer = with_template("<s> $A", ["<s>"])
    item = Item("x", Prompt("Answer:"), (" Yes", " No"), ("Yes", "No"), 0)
    assert encode_items([item], tokenizer, "text", max_tokens=4)[0].option_ids == [[3], [4]]
    with pytest.raises(InputError, match="need 3 tokens without its passage, and at most 2 are allowed"):
        encode_items([item], tokenizer, "text", max_tokens=3)
    assert encode_items([item], tokenizer, "text", 3, whole=4) == encode_items([item], tokenizer, "text", 4)
    with pytest.raises(InputError, match="need 3 tokens without its passage, and at most 2 are allowed"):
        encode_items([item], tokenizer, "text", 3, whole=3)


def test_smollm2_begins_with_nothing(smollm2: Any) -> None:
    assert beginning_ids(smollm2) == []
    items = [read_choices(ARC_EASY).item, read_boolq(BOOLQ).item]
    encoded = encode_items(items, smollm2, "text")
    assert encoded == [encode_item(item, smollm2, "text") for item in items]
    assert all(isinstance(one, EncodedItem) for one in encoded)


def test_a_passage_leaves_room_for_the_beginning(smollm2: Any) -> None:
    """A real tokenizer, told to begin with its end-of-text token as GPT-2 has it."""
    import copy

    from tokenizers import processors

    tokenizer = copy.deepcopy(smollm2)
    token = tokenizer.eos_token
    special = [(token, tokenizer.convert_tokens_to_ids(token))]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=special
    )
    item = read_boolq(boolq_row(passage=LONG)).item
    (encoded,) = encode_items([item], tokenizer, "text", max_tokens=60)
    assert encoded.prompt_ids[0] == special[0][1] and encoded.prompt_ids.count(special[0][1]) == 1
    assert encoded.prompt_ids[1:] == encode_item(item, tokenizer, "text", max_tokens=59).prompt_ids
    assert len(encoded.prompt_ids) + max(map(len, encoded.option_ids)) <= 60
