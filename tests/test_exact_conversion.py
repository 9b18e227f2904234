"""The translated belief beside an exact conversion, benchmarks/exact_conversion.py."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from align import TokenTable
from benchmarks.exact_conversion import ExactConverter, compare, read_texts
from conftest import asset
from isogloss.sample import TextEncoder
from projection_tools import Pair
from projection_tools.cells import cached_translation
from translation import Tables


def converter_of(student, teacher, threshold):
    """Return (ExactConverter, Tables) of two models of the assets."""
    folders = [str(asset("models", name)) for name in (student, teacher)]
    pair = Pair.load(*folders)
    fields = cached_translation(pair)
    tables = [fields[name] for name in Tables._fields]
    tables = [value if isinstance(value, int) else value.long() for value in tables]
    model = AutoModelForCausalLM.from_pretrained(folders[1]).eval()
    longest = model.config.max_position_embeddings
    encoders = []
    for tokenizer in pair.tokenizers:
        encoders.append(TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), longest))
    return ExactConverter(model, *encoders, threshold), Tables(*tables)


@pytest.mark.slow
def test_a_finer_student_gets_the_exact_conversion_but_for_a_hundredth_of_a_nat():
    converter, tables = converter_of("stories260K", "tinytalk_neo_3M", 1e-4)
    divergence = []
    nats = []
    for text in read_texts(asset("text", "tinystories_1000.json"))[:3]:
        done = compare(text, converter, tables)
        divergence += done.divergence["root"] + done.divergence["inside"]
        nats.append((done.exact_nats, done.teacher_nats))
    exact, teacher = np.sum(nats, axis=0)
    # the exact belief knows more ways to write the text than the teacher's own tokens
    assert 0.98 * teacher < exact < 1.001 * teacher
    assert min(divergence) > -1e-4
    assert np.mean(divergence) < 0.01


@pytest.mark.slow
def test_with_one_tokenizer_the_exact_conversion_is_the_teacher_itself():
    converter, _ = converter_of("stories260K", "stories260K", 1e-5)
    text = read_texts(asset("text", "tinystories_1000.json"))[0][:300]
    ids, = converter.teacher.encode([text])
    positions = np.arange(20, 60)
    belief = converter.convert(text, positions, len(ids) - 1)
    with torch.no_grad():
        row = converter.model(input_ids=torch.tensor(ids[:-1])[None]).logits[0].softmax(-1).numpy()
    labels = ids[positions + 1]
    chosen = np.arange(len(positions))
    nats = -np.log(belief[chosen, labels]).sum()
    assert nats == pytest.approx(-np.log(row[positions, labels]).sum(), rel=0.05)
