"""task_model.py: what real tokenizers make of contexts, continuations and stops.

What models say of them is compared in test_task_passes.py.
"""

import pytest

from conftest import asset
from isogloss.evaluation.harness import Written
from isogloss.evaluation.task_model import TaskEncoder, TextStop, write_answers
from isogloss.flags.task_options import TaskOptions

NAMES = "gpt2", "llama2", "llama3", "t5", "tok512", "wordpiece"
WINDOW = 24


def word_pieces():
    """A tokenizer as BERT's: [CLS] in front, [SEP] behind, letters that continue a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["[UNK]", "[CLS]", "[SEP]", "The", "inter", "##national", "The", "cat", "##s", "sat"]
    pieces += list("abcdefghijklmnopqrstuvwxyzT.:,?!") + ["##" + c for c in "abcdefghijklmnop"]
    pieces += ["##" + c for c in "qrstuvwxyz"] + ["international"]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="[CLS]",
                                   eos_token="[SEP]", unk_token="[UNK]")


@pytest.fixture(scope="module", params=NAMES)
def encoder(request):
    """The TaskEncoder of a tokenizer, for a model with a window of 24 tokens."""
    from transformers import AutoTokenizer, LlamaConfig

    if request.param == "wordpiece":
        tokenizer = word_pieces()
    else:
        tokenizer = AutoTokenizer.from_pretrained(asset("tokenizers", request.param))
    config = LlamaConfig(max_position_embeddings=WINDOW, vocab_size=len(tokenizer))
    return TaskEncoder(tokenizer, config)


def ids_of(tokenizer, text):
    """Return the tokens of a text as the tokenizer codes it, without what it puts behind it."""
    coded = tokenizer(text, return_special_tokens_mask=True)
    ids = coded["input_ids"]
    while len(ids) and coded["special_tokens_mask"][len(ids) - 1] and ids[-1] != ids[0]:
        ids = ids[:-1]
    return ids


PAIRS = [  # context, continuation
    ("The cat sat", " on the mat."),
    ("Question: why?\nAnswer:", " B"),
    ("Question: why?\nAnswer: ", "B"),  # the space belongs to the continuation
    ("It was:\n\n\t ", "  two spaces"),
    ("The inter", "national"),  # one token in some vocabularies
    ("He said hel", "lo"),
    ("x = 1", "2345"),
    ("Le café est ", "très cher \N{GRINNING FACE}"),
    ("\N{GRINNING FACE}", "\N{GRINNING FACE}\N{GRINNING FACE}"),
    ("東京", "タワー"),
    ("a", "b"),
    ("The cat sat on the mat and saw the other cat, who sat on another mat, and so on.", " So"),
]


@pytest.mark.parametrize("context, continuation", PAIRS)
def test_requests_are_those_of_the_tokenizer(encoder, context, continuation):
    tokenizer = encoder.tokenizer
    whole = ids_of(tokenizer, context + continuation)
    before = ids_of(tokenizer, context.rstrip())
    start = len(before)
    if len(whole) <= start:
        # A token of the whole text covers the border: from the first token on that the context
        # alone does not have, or the last one, all belongs to the continuation.
        common = [place for place in range(len(whole)) if whole[:place] == before[:place]]
        start = max(common)
    [request] = encoder.requests(context, [continuation])
    if start == 0:  # nothing is before the first token, so the model is given a beginning
        whole = [encoder.first_token, *whole]
        start = 1
    assert request.ids.tolist() == whole[-(WINDOW + 1) :]
    assert request.num_scored == len(whole) - start


def test_many_continuations_are_those_alone(encoder):
    continuations = [" A", " B", " of it", "B", " \N{GRINNING FACE}"]
    together = encoder.requests("The answer is", continuations)
    for request, continuation in zip(together, continuations, strict=True):
        [alone] = encoder.requests("The answer is", [continuation])
        assert request.ids.tolist() == alone.ids.tolist()
        assert request.num_scored == alone.num_scored


def test_without_a_context_the_text_has_a_beginning_and_one_with_bos_no_second_one(encoder):
    tokenizer = encoder.tokenizer
    plain = tokenizer("The cat sat", add_special_tokens=False)["input_ids"]
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    [request] = encoder.requests("", ["The cat sat"])
    assert request.ids.tolist() == [begin, *plain]
    assert request.num_scored == len(plain)
    if tokenizer.bos_token and encoder.prefix:  # it adds bos by itself
        [request] = encoder.requests(f"{tokenizer.bos_token}The cat", [" sat"])
        assert request.ids.tolist().count(tokenizer.bos_token_id) == 1


def test_prompts_fit_into_the_window_and_longer_continuations_are_refused(encoder):
    text = "The cat sat on the mat. " * 9
    ids = ids_of(encoder.tokenizer, text)
    assert encoder.prompt(text, 10) == (ids[-(WINDOW - 10) :], 10)
    assert encoder.prompt(text, 10**6) == (ids[-WINDOW // 2 :], WINDOW // 2)
    short, count = encoder.prompt("The cat", 4)
    assert short == ids_of(encoder.tokenizer, "The cat") and count == 4
    with pytest.raises(ValueError, match="tokens; expected 1 to 24, the model's window"):
        encoder.requests("The", [" cat sat" * 40])


# --- stops ----------------------------------------------------------------------------------------

WRITTEN = [  # a text, and stops that are in it
    ("She has 18 eggs.\n\nQuestion: Who? Answer: Question: no", ("Question:",)),
    ("It is late.\n\n\nHe goes on and on. </s> or", ("\n\n", "</s>")),
    ("The price is 3.50 dollars; so the end#### 4, the cat sat", ("####", " so the e")),
    ("Le café \N{GRINNING FACE}\N{CAT} est là. Voilà", ("\N{GRINNING FACE}\N{CAT}", "là")),
    ("東京タワーは高い。そして終わり。", ("は高い。",)),
    ("no stop is here", ("Question:", "\n")),
]


@pytest.mark.parametrize("text, stops", WRITTEN)
@pytest.mark.parametrize("repeats", [1, 12])
def test_a_stop_is_found_with_its_last_token(encoder, text, stops, repeats):
    """Token by token, as a model writes: where the whole text holds one for the first time."""
    text = "The cat sat. " * (repeats - 1) + text
    ids = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    stop = TextStop(encoder, stops)
    for length in range(1, len(ids) + 1):
        so_far = encoder.tokenizer.decode(ids[:length], skip_special_tokens=True)
        is_there = any(one in so_far for one in stops)
        assert stop(ids[:length]) == is_there, so_far
        if is_there:
            first = min(so_far.find(one) for one in stops if one in so_far)
            assert stop.cut(so_far) == so_far[:first]
            break


def test_an_answer_ends_at_its_stop():
    """stories260K writes; the stop begins inside a token and ends in another."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = asset("models", "stories260K")
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    encoder = TaskEncoder(AutoTokenizer.from_pretrained(path), model.config)
    items = []
    for prompt in ("Once upon a time", "Tom and his mom went to the park. They"):
        items.append(Written(prompt, [], 60, 0.0))
    passes = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    whole = write_answers(model, encoder, items, [(0, 0), (0, 1)], TaskOptions())
    num_whole = len(passes)
    pieces = encoder.tokenizer.encode(whole[1], add_special_tokens=False)
    before = encoder.decode(pieces[:12])
    stop = whole[1][len(before) - 2 : len(before) + 3]
    assert whole[1].index(stop) == len(before) - 2
    assert stop not in [encoder.decode([piece]) for piece in pieces]
    del passes[:]
    stopped = Written(items[1].prompt, [stop], 60, 0.0)
    answers = write_answers(model, encoder, [stopped], [(0, 1)], TaskOptions())
    hook.remove()
    assert answers == [whole[1][: len(before) - 2]]
    assert num_whole == 60 and 12 < len(passes) < 18
    both = write_answers(model, encoder, [items[0], stopped], [(0, 0), (0, 1)], TaskOptions())
    assert both == [whole[0], answers[0]]
