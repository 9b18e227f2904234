"""Open a data set, wherever it is: files, folders, addresses, directories of save_to_disk, the hub.

`datasets` reads .parquet and most .txt files; file_rows.py reads the others, as what they say.

Tests: tests/test_open_data.py, tests/test_wrong_data.py.
"""

import glob
import itertools
import os
import re
import warnings
from dataclasses import dataclass
from urllib.parse import urlsplit

import datasets

from isogloss.data import checks, file_rows
from isogloss.data.texts import chat_of_text, is_message, listed
from isogloss.errors import DataError

STRINGS = ("string", "large_string", "string_view")
ROWS_TO_TRY = 8  # rows that have to tell what a column holds where its type does not
OF_PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)':")  # a chat as str() writes it
ROWS_TO_NAME = 10_000  # among which one that is no text is named
# columns that data sets of chats have, and that chat templates would be told of
FOR_MODELS = "system", "system_prompt", "functions", "chat_template_kwargs"


@dataclass
class DataRequest:
    """Say what of a data set is wanted; see `load_dataset`."""

    source: str
    text_key: str
    split: str
    streaming: bool
    plain_keys: dict
    json_keys: tuple
    optional_keys: tuple
    txt_samples: str


def load_dataset(source, text_key, split="train", streaming=False, *, plain_keys=None,
                 json_keys=(), optional_keys=(), txt_samples="line"):
    """Open a data set and check that it holds text.

    Args:
        source: hub id ("org/name" or "org/name:config"); a local file, directory or glob of files
            ending in .txt, .jsonl, .json, .parquet, .arrow or .csv, the texts also compressed
            (.jsonl.gz); the address of such a file (https://, hf://); or a directory of
            save_to_disk.
        text_key: column of texts or chats.
        split: of a hub data set, of a directory whose files belong to several, or of a directory
            of save_to_disk that holds several.
        streaming: open a stream.
        plain_keys: {other column that is read, of texts or numbers: flag that names it}.
        json_keys: other columns that are read, of whatever JSON can say.
        optional_keys: those that may be missing, likewise; "*": all that the first rows have.
        txt_samples: what a sample of a .txt file is: "line", "paragraph" or "file".
    Returns:
        datasets.Dataset or IterableDataset.
    Raises:
        DataError: with what arrived, what was expected and what to do.
    """
    request = DataRequest(source, text_key, split, streaming, plain_keys or {}, json_keys,
                          optional_keys, txt_samples)
    with checks.explained(source):
        dataset = _open(request)
        columns = column_names(dataset)
    if not columns or (not streaming and len(dataset) == 0):
        raise DataError(f"--data {source}: {checks.EMPTY_DATA}")
    if text_key not in columns:
        raise DataError(lacks(request, source, text_key, columns))
    _warn_of_unread(request, columns)
    _check_type(source, dataset, text_key)
    if not streaming:
        with checks.explained(source):
            checks.check_column(source, dataset, text_key)
    return dataset


def _warn_of_unread(request, columns):
    """Warn of columns that are not read, and which are there for models to read."""
    read = {request.text_key, *request.json_keys, *request.plain_keys, *request.optional_keys}
    for name in sorted(set(FOR_MODELS) & set(columns) - read):
        warn_of_unread(f"--data {request.source}", name)


def warn_of_unread(source, name):
    """Warn of one of the columns `FOR_MODELS`."""
    warnings.warn(f"{source}: no model reads its column {name!r}; write what it says into the "
                  "messages or texts, or name it by a flag", stacklevel=3)


def column_names(dataset):
    """List the columns; of a stream whose columns are not declared, those of its first row."""
    return dataset.column_names or list(next(iter(dataset.take(1)), {}))


def _open(request):
    source = request.source
    path = os.path.expanduser(source)
    if "://" in source:
        from isogloss.data.kinds.elsewhere import files_at

        return _open_files(request, {"train": files_at(source)})
    if checks.is_saved(path):
        from isogloss.data.kinds.elsewhere import open_saved

        return open_saved(request, path)
    files = checks.local_files(source)
    if files:  # local files come first: a folder may have the name of a hub id
        splits = {"train": files}
        if os.path.isdir(path):
            from isogloss.data.kinds.several_files import splits_of

            splits = splits_of(path, files)
        return _open_files(request, splits)
    if os.path.isdir(path):
        raise DataError(f"--data {source}: holds no file that can be read; expected files of kind "
                        f"{checks.KINDS}")
    is_path = checks.kind_of(source) or source.startswith((".", "/", "~"))
    if is_path or source.count("/") != 1 or glob.has_magic(source):
        raise DataError(f"--data {source}: no such file, directory or glob match; expected files "
                        f"of kind {checks.KINDS} or a hub id like org/name")
    from isogloss.data.kinds.elsewhere import open_hub

    return open_hub(request)


# --- files ----------------------------------------------------------------------------------------


def _open_files(request, splits):
    source = request.source
    names = names_of_splits(request, splits)
    wanted = {name: splits[name] for name in names}
    files = list(itertools.chain.from_iterable(wanted.values()))
    is_local = "://" not in source
    if is_local:
        for file in files:
            checks.check_is_file(source, file)
    kind = _kind_of(source, files)
    if is_local:
        for file in files:
            checks.check_first_bytes(source, file)
        if not any(os.path.getsize(file) for file in files):
            raise DataError(f"--data {source}: {checks.EMPTY_DATA}")
    if request.txt_samples != "line" and kind != "text":
        raise DataError(f"--data: txt_samples {request.txt_samples}: is for .txt files, and "
                        f"{source} holds none; leave it out")
    if kind == "text" and request.streaming and request.txt_samples == "line":
        return open_splits(request, kind, {"text": datasets.Value("string")}, wanted)
    if kind == "text":
        sample = "document" if request.txt_samples == "file" else request.txt_samples
        # -sig: a byte order mark is no text
        return _read_files(request, kind, wanted, {"encoding": "utf-8-sig", "sample_by": sample})
    features = features_of(request, kind, files, is_local)
    if kind == "parquet":
        # with types, because those of other columns may be none that `datasets` knows
        return _read_files(request, kind, wanted, {"columns": list(features), "features": features})
    return open_splits(request, kind, features, wanted)


def _read_files(request, kind, wanted, options):
    if "://" not in request.source:  # brackets and stars in the names of files are meant as such
        wanted = {name: list(map(glob.escape, wanted[name])) for name in wanted}
    return datasets.load_dataset(kind, data_files=wanted, split=request.split,
                                 streaming=request.streaming, **options)


def names_of_splits(request, splits):
    """Return the splits that --split names, as in train, train+test or train[:10%]."""
    if request.split == "train" and set(splits) == {"train"}:
        return ["train"]
    from isogloss.data.kinds.several_files import named_splits

    return named_splits(request, splits)


def _kind_of(source, files):
    """Return the one reader of all files; a DataError where there are several or none."""
    kinds = set()
    suffixes = set()
    for file in files:
        name = urlsplit(file).path if "://" in file else file
        kinds.add(checks.kind_of(name))
        suffixes.add("".join(checks.split_suffix(name)) or os.path.basename(name))
    if len(kinds) > 1 or None in kinds:
        raise DataError(f"--data {source}: files of kind {', '.join(sorted(suffixes))}; expected "
                        f"one of {checks.KINDS}")
    return kinds.pop()


def features_of(request, kind, files, is_local):
    """Return the types of the columns that are read, which all files have to have alike."""
    needed = (request.text_key, *request.json_keys, *request.plain_keys)
    columns_of_files = {}
    for file in files if is_local else files[:1]:
        columns = _columns_of(kind, [file], needed)
        if columns:  # else it is empty
            columns_of_files[file] = columns
    first = next(iter(columns_of_files.values()), {})
    if kind == "json":  # more rows tell more
        first = _columns_of(kind, files)
    if not first:
        raise DataError(f"--data {request.source}: {checks.EMPTY_DATA}")
    _warn_of_unread(request, first)
    for name in needed:
        if name not in first:
            raise DataError(lacks(request, request.source, name, first))
    if len(columns_of_files) > 1:
        from isogloss.data.kinds.several_files import check_alike

        check_alike(request, columns_of_files, kind == "json")
    if kind == "json" and not isinstance(first[request.text_key], datasets.Json):
        _check_dtype(request.source, first[request.text_key], request.text_key)
    features = datasets.Features({name: first[name] for name in needed})
    every = first if "*" in request.optional_keys else ()
    for name in sorted({*request.optional_keys, *every} - {"*"}):
        if kind == "json":  # it may first come in a late row
            features.setdefault(name, datasets.Json())
        elif name in first:
            features.setdefault(name, first[name])
    return features


def lacks(request, place, name, columns):
    names = ", ".join(columns)
    hint = "; name one of them with --text_key, or two with --prompt_key and --completion_key"
    hint = hint if name == request.text_key else ""
    if place == request.source and not hint:
        flag = request.plain_keys.get(name, "--prompt_key")
        return f"{flag} {name}: no such column; it has {names}"
    return f"--data {place}: no column {name!r}; it has {names}{hint}"


def _columns_of(kind, files, wanted=()):
    """Return {column: type} of files, of JSON from their first rows; {} of empty files."""
    if kind == "json":
        first = file_rows.first_values(files, wanted)
        return {name: file_rows.feature_of(values) for name, values in first.items()}
    from isogloss.data.kinds.tables import columns_of

    return columns_of(kind, files[0])


def open_splits(request, kind, features, splits):
    """Open the files of splits, {name: files}, as `file_rows.named_rows` reads them."""
    if request.streaming:
        files = itertools.chain.from_iterable(splits.values())
        return file_rows.open_rows_of_files(kind, files, features, streaming=True)
    by_split = {name: file_rows.open_rows_of_files(kind, files, features, streaming=False)
                for name, files in splits.items()}
    return part_of(by_split, request.split)


def part_of(by_split, split):
    """Return what a --split such as train+test or train[:10%] names of {name: Dataset}."""
    sizes = {name: len(dataset) for name, dataset in by_split.items()}
    parts = []
    for part in datasets.ReadInstruction.from_spec(split).to_absolute(sizes):
        dataset = by_split[part.splitname]
        parts.append(dataset.select(range(part.from_ or 0, part.to or len(dataset))))
    return datasets.concatenate_datasets(parts)


# --- check ----------------------------------------------------------------------------------------


def filled_columns(dataset):
    """Return the columns whose type fills up with null what a value lacks."""
    names = set()
    for name, feature in (dataset.features or {}).items():
        if "struct" in str(getattr(feature, "pa_type", "")) or _holds_objects(feature):
            names.add(name)
    return frozenset(names)


def _holds_objects(feature):
    if isinstance(feature, dict):
        return True
    items = getattr(feature, "feature", None)
    return items is not None and _holds_objects(items)


def holds_chats(dataset, text_key):
    """Tell whether the column holds lists of messages, or its first rows nothing but JSON of these.

    Raises:
        DataError: they hold lists of messages as Python writes them.
    """
    feature = (dataset.features or {}).get(text_key)
    # of a list, the type of its items; of text there is none
    message = getattr(feature, "feature", None)
    if isinstance(feature, dict) and all(hasattr(its, "feature") for its in feature.values()):
        message = feature  # the list is inside
    if isinstance(message, dict):
        return {"role", "content"} <= set(message) or {"from", "value"} <= set(message)
    if feature is None or getattr(feature, "dtype", None) in STRINGS:
        try:
            texts = [row.get(text_key) for row in dataset.take(ROWS_TO_TRY)]
        except ValueError:  # they are no text, as is said where they are checked
            return False
        if all(isinstance(text, str) for text in texts):
            if any(map(OF_PYTHON.match, texts)):
                raise DataError(f"--data: {text_key!r} holds chats as Python prints them; "
                                "write them as lists, or as JSON (json.dumps)")
            chats = list(map(chat_of_text, texts))
            return None not in chats and any(chats)
    if feature is None or isinstance(message or feature, datasets.Json):
        # The first rows have to tell: of a stream without declared columns, or where messages
        # differ in their keys or types.
        for row in dataset.take(ROWS_TO_TRY):
            chat = listed(row.get(text_key))
            if isinstance(chat, list) and any(map(is_message, chat)):
                return True
    return False


def first_rows(dataset, count, text_key, source=""):
    """Return the first rows, at most `count`, each of which has been checked."""
    with checks.explained(source):
        rows = list(dataset.take(count))
    for number, row in enumerate(rows):
        checks.check_content(source, number, text_key, row.get(text_key))
    return rows


def _check_type(source, dataset, text_key):
    """Raise a DataError where a column, or the first row of a stream, is no text and no chat."""
    feature = (dataset.features or {}).get(text_key)
    if feature is None:
        first_rows(dataset, 1, text_key, source)
    elif not holds_chats(dataset, text_key):
        is_mixed = isinstance(feature, datasets.Json)
        if is_mixed and isinstance(next(iter(dataset.take(1)), {}).get(text_key), str):
            first_rows(dataset, ROWS_TO_NAME, text_key, source)
        _check_dtype(source, feature, text_key)


def _check_dtype(source, feature, text_key):
    if getattr(feature, "dtype", None) not in STRINGS:
        raise DataError(
            f"--data {source}: column {text_key!r} holds {checks.name_of_type(feature)}, expected "
            "text or chats as lists of role and content; repair it or name another column with "
            "--text_key")
