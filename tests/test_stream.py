"""stream.py: an order by the seed alone, and a run that goes on without what it has read."""

import gzip
import io
import itertools
import json

import datasets
import fsspec
import pytest

import ranks
from isogloss.data import file_rows, stream as stream_module
from isogloss.data.checks import BadLine
from isogloss.data.file_rows import Piece, named_rows, pieces_of
from isogloss.data.open_data import load_dataset
from isogloss.data.order import ExampleReader, Places
from isogloss.data.stream import StreamedExamples
from isogloss.errors import DataError
from jobs import ds_config, losses_of, run_distill

READER = ExampleReader("text")
NUM_FILES = 3
ROWS_OF_FILE = 40


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(stream_module, "BLOCK_ROWS", 16)


def text_of(file, row):
    return f"file {file} row {row}"


WRITERS = {
    ".jsonl": lambda path, rows: path.write_text(lines_of(rows)),
    ".jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines_of(rows).encode())),
    ".parquet": lambda path, rows: datasets.Dataset.from_list(rows).to_parquet(path),
    ".txt": lambda path, rows: path.write_text("\n".join(row["text"] for row in rows)),
    ".chats.jsonl": lambda path, rows: path.write_text(lines_of(
        [{"text": [{"role": "user", "content": row["text"]}]} for row in rows])),
}


def lines_of(rows):
    return "\n".join(map(json.dumps, rows))


def write_files(folder, ending):
    """Write the same rows in files of a kind; return what --data says of them."""
    for file in range(NUM_FILES):
        rows = [{"text": text_of(file, row)} for row in range(ROWS_OF_FILE)]
        WRITERS[ending](folder / f"{file}{ending}", rows)
    return str(folder)


ALL = {text_of(file, row) for file in range(NUM_FILES) for row in range(ROWS_OF_FILE)}


def text_in(example):
    content = example.content
    return content if isinstance(content, str) else content[0]["content"]


@pytest.fixture(scope="module", params=WRITERS)
def dataset(request, tmp_path_factory):
    """A stream of files of every kind; those of lines are read in pieces."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_rows, "PIECE_BYTES", 300)
        opened = load_dataset(write_files(folder, request.param), "text", streaming=True)
    is_cut = request.param in (".jsonl", ".txt", ".chats.jsonl")
    assert opened.num_shards > NUM_FILES if is_cut else opened.num_shards == NUM_FILES
    return opened


def read(dataset, begin, end, place=None, skipped=0, seed=3, reader=READER):
    """Return ([text], StreamedExamples) of some positions."""
    # skip and select make a data set with a state of its own
    fresh = dataset.skip(skipped) if skipped else dataset.select_columns(["text"])
    examples = StreamedExamples(fresh, reader, seed, skipped, place)
    return [text_in(examples.example(position)) for position in range(begin, end)], examples


def test_every_epoch_gives_every_row_once_in_an_order_of_its_own(dataset):
    """Of the files too."""
    size = len(ALL)
    orders = set()
    for seed in range(4):
        texts, _ = read(dataset, 0, 2 * size, seed=seed)
        assert texts == read(dataset, 0, 2 * size, seed=seed)[0]
        for epoch in (texts[:size], texts[size:]):
            assert set(epoch) == ALL and epoch != sorted(epoch)
            orders.add(tuple(epoch))
    assert len(orders) == 8
    # the numbers of the files in the order in which they begin
    assert len({tuple(dict.fromkeys(text.split()[1] for text in order)) for order in orders}) > 2


def check_goes_on(dataset, end, positions, **options):
    """See that a stream goes on from the place of some positions; return the texts before `end`.

    The place survives JSON.
    """
    whole, _ = read(dataset, 0, end, **options)
    for position in positions:
        _, examples = read(dataset, 0, position + 1, **options)
        place = json.loads(json.dumps(examples.place))
        assert position - stream_module.BLOCK_ROWS < place["position"] <= position
        texts, _ = read(dataset, position, end, place, **options)
        assert texts == whole[position:], position
    return whole


@pytest.mark.parametrize("skipped", [0, 7])
def test_a_stream_goes_on_from_the_place_of_any_position(dataset, skipped):
    """Also from the second epoch, and across its beginning."""
    end = 2 * len(ALL) + 30
    positions = (0, 5, 16, 47, len(ALL) - skipped - 1, len(ALL) + 3, end - 1)
    check_goes_on(dataset, end, positions, skipped=skipped)


def test_a_stream_of_joined_rows_goes_on_from_the_place_of_any_position(tmp_path):
    """Whole samples: none is begun before the place, or cut at the end of a block or a file."""
    reader = ExampleReader("text", join=50)  # 4 or 5 rows of 12 or 13 characters
    dataset = load_dataset(write_files(tmp_path, ".jsonl.gz"), "text", streaming=True)
    whole = check_goes_on(dataset, 65, (0, 3, 4, 28, 29, 30, 47, 64), reader=reader)
    num_short = 0
    for text in whole:
        *others, last = text.split("\n")
        assert sum(map(len, others)) < 50
        num_short += sum(map(len, [*others, last])) < 50
    assert num_short <= 2  # what is left at the end of an epoch
    seen = "\n".join(whole).split("\n")
    assert set(seen[: len(ALL)]) == ALL  # each row once, then the next epoch


def test_rows_before_a_place_are_not_read_again():
    reads = []

    def rows(files):
        for file in files:
            for row in range(ROWS_OF_FILE):
                reads.append(file)
                yield {"text": text_of(file, row)}

    def stream(place=None):
        dataset = datasets.IterableDataset.from_generator(
            rows, gen_kwargs={"files": list(range(NUM_FILES))})
        return StreamedExamples(dataset, READER, 3, place=place)

    first = stream()
    position = 2 * ROWS_OF_FILE + 20
    for number in range(position):
        first.example(number)
    last_file = reads[-1]
    reads.clear()
    stream(first.place).example(position)
    # the rows of the same file that stand before the place, and no other file's
    assert set(reads) == {last_file} and len(reads) <= ROWS_OF_FILE


def test_an_epoch_without_text_ends_the_job_but_not_the_rest_of_one(tmp_path):
    lines = [json.dumps({"text": text}) for text in ["a"] * 20 + [""] * 20]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    lines_of_text = load_dataset(str(tmp_path), "text", streaming=True)
    _, examples = read(lines_of_text, 0, 33)
    assert read(lines_of_text, 34, 50, examples.place)[0]
    empty = datasets.Dataset.from_dict({"text": [""] * 20}).to_iterable_dataset()
    with pytest.raises(DataError, match="all rows of 'text' are empty"):
        StreamedExamples(empty, READER, 3).example(30)


def test_a_reader_leaves_alone_what_all_workers_share(dataset):
    """The number of the epoch: `datasets` adds to it in place, in the memory of all workers."""
    shared = dataset.select_columns(["text"])
    examples = StreamedExamples(shared, READER, 3)
    positions = range(2 * len(ALL))
    assert {text_in(examples.example(position)) for position in positions} == ALL
    assert shared.epoch == 0


def test_places_are_found_by_position():
    places = Places()
    assert places.before(9) is None
    for position in (0, 0, 16, 32, 48):
        places.note({"position": position})
        places.note(None)
    assert places.before(15)["position"] == 0
    assert places.before(40)["position"] == 32
    assert places.before(32)["position"] == 32
    assert places.before(31) is None  # forgotten
    later = Places()
    later.note({"position": 16})
    assert later.before(3) is None


@pytest.mark.slow
def test_a_streamed_run_resumes_bit_by_bit(models, texts, tmp_path):
    """For any number of workers and ranks; the checkpoint knows the place of its next sample."""
    folder = tmp_path / "data"
    folder.mkdir()
    for file in range(2):
        rows = [json.dumps({"text": text}) for text in texts[20 * file : 20 * file + 20]]
        (folder / f"{file}.jsonl").write_text("\n".join(rows))
    argv = [f"--student={models[0]}", "--kd_weight=0", "--max_length=40", f"--data={folder}",
            "--streaming", "--save_every=3", "--join_rows=300"]

    def line(num_ranks, output, steps, num_workers):
        config = ds_config(tmp_path / f"ds{num_ranks}.json", 1, 8 // num_ranks, 1)
        return [*argv, f"--ds_config={config}", f"--output_dir={tmp_path / output}",
                f"--steps={steps}", f"--num_workers={num_workers}"]

    codes = ranks.run(1, run_distill, [
        line(1, "whole", 12, 1), line(1, "parts", 6, 0), line(1, "parts", 9, 2),
        line(1, "parts", 12, 1), line(1, "moved", 6, 1)])
    assert codes == [[0] * 5]
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "parts")
    position = json.loads(
        (tmp_path / "parts" / "checkpoints" / "step_0000012" / "position.json").read_text())
    place = position["state"]["place"]
    assert 0 < place["position"] <= 12 * 8
    assert place["epoch"] > 0
    assert ranks.run(2, run_distill, [line(2, "moved", 12, 1)]) == [[0], [0]]
    for one, other in zip(losses_of(tmp_path / "whole"), losses_of(tmp_path / "moved"),
                          strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


# --- pieces of files ------------------------------------------------------------------------------


ROWS = [{"text": text} for text in ("a", "b\u20ac\n", "", "c" * 60, "d", "e" * 9)]
BLANKS = "\n \n\r\n"
AWKWARD = {
    "plain.jsonl": lines_of(ROWS) + "\n",
    "unended.jsonl": lines_of(ROWS),
    "bom.jsonl": "\ufeff" + lines_of(ROWS),
    "returns.jsonl": lines_of(ROWS).replace("\n", "\r\n"),
    "blank.jsonl": BLANKS * 5 + lines_of(ROWS).replace("\n", "\n\n") + BLANKS,
    "pairs.jsonl": lines_of(ROWS[:3]).replace("\n", "  ") + "\n" + lines_of(ROWS[3:]),
    "list.jsonl": json.dumps(ROWS, indent=1),
    "line.json": json.dumps(ROWS),
    "late.json": BLANKS * 9 + json.dumps(ROWS, indent=1),
    "bom.json": "\ufeff" + json.dumps(ROWS, indent=1),
    "object.jsonl": json.dumps({"text": "one\ntwo"}, indent=1),
    "odd.json": '{"text":\n"one"\n}\n',
    "lines.txt": "\ufeffone\r\ntwo\rthree\n\n\u20ac" + "four" * 20 + "\n\n\ufefflast",
    "ended.txt": "one\n\n",
    "void.txt": "",
}


def rows_of(pieces):
    kind = "text" if pieces[0].file.endswith(".txt") else "json"
    return [row["text"] for row in named_rows(kind, pieces, (("text", None),))]


def all_cuts(kind, path, monkeypatch):
    """Yield the pieces of a file for every size of these."""
    for size in range(1, path.stat().st_size + 2):
        monkeypatch.setattr(file_rows, "PIECE_BYTES", size)
        yield pieces_of(kind, [str(path)], True)


@pytest.mark.parametrize("name", AWKWARD)
def test_pieces_of_a_file_have_its_rows(name, tmp_path, monkeypatch):
    """Wherever it is cut: at the start of a line, in a character, in a line that fills several."""
    path = tmp_path / name
    path.write_bytes(AWKWARD[name].encode())
    whole = rows_of([Piece(str(path))])
    if name.endswith(".txt"):
        with open(path, encoding="utf-8-sig") as file:
            assert whole == [line.removesuffix("\n") for line in file]
    elif name not in ("object.jsonl", "odd.json"):
        assert whole == [row["text"] for row in ROWS]
    else:
        assert len(whole) == 1
    kind = "text" if name.endswith(".txt") else "json"
    for pieces in all_cuts(kind, path, monkeypatch):
        assert rows_of(pieces) == whole
        assert list(itertools.chain.from_iterable(rows_of([piece]) for piece in pieces)) == whole
    assert len(pieces) == 1


BAD_LINES = {"no JSON": b'{"text": ', "no object": b"7", "no UTF-8": b'{"text": "\xe9"}',
             "another type": b'{"text": 7}', "no list": b"[7"}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_of_a_piece_is_named_by_its_number_in_the_file(case, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    before = [json.dumps(row).encode() for row in ROWS]
    if case == "no list":  # it begins a file
        before = [b""] * len(ROWS)
    path.write_bytes(b"\r\n".join([b"", *before, BAD_LINES[case], b'{"text": "z"}']))
    for pieces in all_cuts("json", path, monkeypatch):
        with pytest.raises(BadLine, match=r"line 8\b"):
            list(named_rows("json", pieces[::-1], (("text", "string"),)))


def test_a_stream_reads_no_more_again_than_a_piece(tmp_path, monkeypatch):
    """And the first line of its file, which tells how it is to be read."""
    path = tmp_path / "a.jsonl"
    path.write_text(lines_of([{"text": f"{row} " * 200} for row in range(400)]))
    num_read = 0

    class Counted(io.FileIO):
        def readinto(self, buffer):
            nonlocal num_read
            size = super().readinto(buffer)
            num_read += size
            return size

    size = path.stat().st_size
    monkeypatch.setattr(file_rows, "PIECE_BYTES", size // 8)
    dataset = load_dataset(str(path), "text", streaming=True)
    whole, examples = read(dataset, 0, 400)
    monkeypatch.setattr(file_rows, "_open", Counted)
    assert read(dataset, 395, 400, examples.place)[0] == whole[395:]
    assert size // 16 < num_read < size // 4  # what is left of one piece, and what is behind it


def test_pieces_of_a_file_far_away_are_read(monkeypatch):
    """But where a server says that it gives no part of a file."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/pieces/a.jsonl", lines_of(ROWS).encode())
    monkeypatch.setattr(file_rows, "PIECE_BYTES", 20)
    [*pieces] = pieces_of("json", ["memory://pieces/a.jsonl"], True)
    assert len(pieces) > 5 and rows_of(pieces) == [row["text"] for row in ROWS]
    info = memory.info("/pieces/a.jsonl")
    for told in ({"partial": False}, {"size": None}):
        monkeypatch.setattr(type(memory), "info", lambda self, path, told=told: info | told)
        assert len(pieces_of("json", ["memory://pieces/a.jsonl"], True)) == 1


@pytest.mark.parametrize("pieces", [None, 2])
def test_a_place_among_other_pieces_is_refused(pieces, tmp_path):
    """None: of a checkpoint from before there were any."""
    dataset = load_dataset(write_files(tmp_path, ".jsonl"), "text", streaming=True)
    _, examples = read(dataset, 0, 20)
    place = examples.place | {"pieces": pieces}
    if pieces is None:
        del place["pieces"]
    with pytest.raises(DataError, match=r"read in 3 pieces, and the .* in (2|whole files)"):
        read(dataset, 19, 20, place)
