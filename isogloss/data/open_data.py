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
import fsspec

from isogloss.data import checks, file_rows
from isogloss.data.texts import chat_of_text, is_message, listed
from isogloss.errors import DataError

STRINGS = ("string", "large_string", "string_view")
ROWS_TO_TRY = 8  # rows that have to tell what a column holds where its type does not
# columns that data sets of chats have, and that chat templates would be told of
FOR_MODELS = "system", "system_prompt", "functions", "chat_template_kwargs"
# What the names of builders of the hub begin with -> our reader.
READERS_OF_HUB = {"Json": "json", "Csv": "csv"}


@dataclass
class Request:
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
        optional_keys: those that may be missing, likewise.
        txt_samples: what a sample of a .txt file is: "line", "paragraph" or "file".
    Returns:
        datasets.Dataset or IterableDataset.
    Raises:
        DataError: with what arrived, what was expected and what to do.
    """
    plain_keys = plain_keys or {}
    request = Request(source, text_key, split, streaming, plain_keys, json_keys, optional_keys,
                      txt_samples)
    with checks.explained(source):
        dataset = _open(request)
        columns = column_names(dataset)
    if not columns or (not streaming and len(dataset) == 0):
        raise DataError(f"--data {source}: {checks.EMPTY_DATA}")
    if text_key not in columns:
        raise DataError(f"--data {source}: no column {text_key!r}; it has {', '.join(columns)}; "
                        "name one of them with --text_key")
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
        warnings.warn(f"--data {request.source}: no model reads its column {name!r}; write what it "
                      "says into the messages or texts, or name it by a flag", stacklevel=2)


def column_names(dataset):
    """List the columns; of a stream whose columns are not declared, those of its first row."""
    return dataset.column_names or list(next(iter(dataset.take(1)), {}))


def _open(request):
    source = request.source
    path = os.path.expanduser(source)
    if "://" in source:
        return _open_files(request, {"train": _files_at(source)})
    if checks.is_saved(path):
        return _open_saved(request, path)
    files = checks.local_files(source)
    if files:  # local files come first: a folder may have the name of a hub id
        return _open_files(request, _splits_of(path, files))
    if os.path.isdir(path):
        raise DataError(f"--data {source}: holds no file that can be read; expected files of kind "
                        f"{checks.KINDS}")
    is_path = checks.kind_of(source) or source.startswith((".", "/", "~"))
    if is_path or source.count("/") != 1 or glob.has_magic(source):
        raise DataError(f"--data {source}: no such file, directory or glob match; expected files "
                        f"of kind {checks.KINDS} or a hub id like org/name")
    return _open_hub(request)


# --- files ----------------------------------------------------------------------------------------


def _files_at(address):
    """List the files at an address; those of the hub may be named by a glob."""
    if address.startswith(("http://", "https://")) or not glob.has_magic(address):
        return [address]
    filesystem, path = fsspec.core.url_to_fs(address)
    files = [filesystem.unstrip_protocol(file) for file in filesystem.glob(path)]
    if not files:
        raise DataError(f"--data {address}: no file matches")
    return sorted(files)


def _splits_of(path, files):
    """Return {split: files}; all belong to "train" unless a folder's names tell otherwise."""
    if not os.path.isdir(path):
        return {"train": files}
    try:
        named = datasets.load_dataset_builder(path).config.data_files
    except FileNotFoundError:  # files that we read and `datasets` does not look for
        named = {}
    if set(named) <= {"train"}:
        return {"train": files}
    splits = {}
    for split, of_split in named.items():
        members = set(map(os.path.realpath, of_split))
        splits[str(split)] = [file for file in files if os.path.realpath(file) in members]
    return splits


def _open_files(request, splits):
    source = request.source
    names = _names_of_splits(request, splits)
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
        return _open_rows(request, kind, {"text": datasets.Value("string")}, wanted)
    if kind == "text":
        sample = "document" if request.txt_samples == "file" else request.txt_samples
        # -sig: a byte order mark is no text
        return _read_files(request, kind, wanted, {"encoding": "utf-8-sig", "sample_by": sample})
    features = _features_of(request, kind, files, is_local)
    if kind == "parquet":
        return _read_files(request, kind, wanted, {"columns": list(features)})
    return _open_rows(request, kind, features, wanted)


def _read_files(request, kind, wanted, options):
    if "://" not in request.source:  # brackets and stars in the names of files are meant as such
        wanted = {name: list(map(glob.escape, wanted[name])) for name in wanted}
    return datasets.load_dataset(kind, data_files=wanted, split=request.split,
                                 streaming=request.streaming, **options)


def _names_of_splits(request, splits):
    """Return the splits that --split names, as in train, train+test or train[:10%]."""
    source = request.source
    names = re.sub(r"\[[^\]]*\]", "", request.split).split("+")
    is_part = "[" in request.split
    if set(splits) == {"train"}:
        if set(names) != {"train"} or (is_part and request.streaming):
            raise DataError(f"--split {request.split}: files have no splits; leave it out, and "
                            "name the files of one split by --data")
        return ["train"]
    for name in names:
        if not splits.get(name):
            raise DataError(f"--split {request.split}: {source} has no files of {name!r}; it has "
                            f"{', '.join(splits)}")
    if is_part and request.streaming:
        raise DataError(f"--split {request.split}: a stream has no parts; name whole splits, or "
                        "leave out --streaming")
    return list(dict.fromkeys(names))


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


def _features_of(request, kind, files, is_local):
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
            raise DataError(_lacks(request, request.source, name, first))
    if len(columns_of_files) > 1:
        _check_alike(request, columns_of_files, kind == "json")
    if kind == "json" and not isinstance(first[request.text_key], datasets.Json):
        _check_dtype(request.source, first[request.text_key], request.text_key)
    features = datasets.Features({name: first[name] for name in needed})
    for name in request.optional_keys:
        if kind == "json":  # it may first come in a late row
            features[name] = datasets.Json()
        elif name in first:
            features[name] = first[name]
    return features


def _lacks(request, place, name, columns):
    names = ", ".join(columns)
    hint = "; name one of them with --text_key" if name == request.text_key else ""
    if place == request.source and not hint:
        flag = request.plain_keys.get(name, "--prompt_key")
        return f"{flag} {name}: no such column; it has {names}"
    return f"--data {place}: no column {name!r}; it has {names}{hint}"


def _check_alike(request, columns_of_files, is_json):
    """Raise a DataError where a file, of {file: {column: type}}, differs from the first."""
    (first_file, first), *others = columns_of_files.items()
    needed = (request.text_key, *request.json_keys, *request.plain_keys)
    optional = () if is_json else request.optional_keys
    for file, columns in others:
        for name in needed:
            if name not in columns:
                raise DataError(_lacks(request, f"{request.source}: {file}", name, columns))
        for name in optional:
            if (name in columns) != (name in first):
                place = file if name in first else first_file
                raise DataError(f"--data {request.source}: {place}: no column {name!r}, which "
                                "other files have; write them alike")
        for name in (*needed, *optional):
            if not (name in columns and name in first):
                continue
            if not _are_alike(columns[name], first[name], is_json):
                raise DataError(f"--data {request.source}: {file}: column {name!r} holds "
                                f"{checks.name_of_type(columns[name])}, but "
                                f"{checks.name_of_type(first[name])} in {first_file}; "
                                "write them alike, or name one --data")


def _are_alike(feature, of_first, is_json):
    """Tell whether values of a type can be read as those of the first file."""
    families = {_family(feature), _family(of_first)} - {"null"}
    if families != {"objects"} or is_json:  # of JSON, each row tells
        return len(families) <= 1
    nothing = datasets.Features({"": feature}).arrow_schema.empty_table()
    try:
        datasets.table.table_cast(nothing, datasets.Features({"": of_first}).arrow_schema)
    except (TypeError, ValueError):
        return False
    return True


def _family(feature):
    """Return what types have in common that are read as one."""
    if not isinstance(feature, datasets.Value):
        return "objects"
    if feature.dtype in STRINGS:
        return "string"
    return "number" if feature.dtype.startswith(("int", "uint", "float")) else feature.dtype


def _columns_of(kind, files, wanted=()):
    """Return {column: type} of files, of JSON from their first rows; {} of empty files."""
    if kind == "json":
        first = file_rows.first_values(files, wanted)
        return {name: file_rows.feature_of(values) for name, values in first.items()}
    if kind == "csv":
        return {name: datasets.Value("string") for name in file_rows.header_of(files[0])}
    return datasets.Features.from_arrow_schema(file_rows.schema_of(kind, files[0]))


def _open_rows(request, kind, features, splits):
    """Open the files of splits, {name: files}, as `file_rows.named_rows` reads them."""
    if request.streaming:
        files = itertools.chain.from_iterable(splits.values())
        return file_rows.open_rows_of_files(kind, files, features, streaming=True)
    by_split = {}
    for name, files in splits.items():
        by_split[name] = file_rows.open_rows_of_files(kind, files, features, streaming=False)
    sizes = {name: len(dataset) for name, dataset in by_split.items()}
    parts = []
    for part in datasets.ReadInstruction.from_spec(request.split).to_absolute(sizes):
        dataset = by_split[part.splitname]
        parts.append(dataset.select(range(part.from_ or 0, part.to or len(dataset))))
    return datasets.concatenate_datasets(parts)


# --- other places ---------------------------------------------------------------------------------


def _open_saved(request, path):
    """Open a directory of save_to_disk, of one data set or of several splits."""
    source = request.source
    split = request.split
    dataset = datasets.load_from_disk(path)
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise DataError(f"--split {split}: {source} has no such split; it has "
                            f"{', '.join(dataset)}")
        dataset = dataset[split]
    elif split not in ("train", str(dataset.split)):
        raise DataError(f"--split {split}: {source} is one data set without splits; leave it out")
    return dataset.to_iterable_dataset() if request.streaming else dataset


def _open_hub(request):
    """Open a data set of the hub; its JSON and CSV files as local ones."""
    name, _, config = request.source.partition(":")
    builder = datasets.load_dataset_builder(name, config or None)
    files = getattr(builder.config, "data_files", None)
    kind = next((READERS_OF_HUB[prefix] for prefix in READERS_OF_HUB
                 if type(builder).__name__.startswith(prefix)), None)
    # a card may say more of the files than that they are there
    is_plain = builder.info.features is None and not getattr(builder.config, "field", None)
    if files and kind and is_plain and getattr(builder.config, "sep", ",") == ",":
        splits = {str(split): list(files[split]) for split in files}
        wanted = {split: splits[split] for split in _names_of_splits(request, splits)}
        of_all = list(itertools.chain.from_iterable(wanted.values()))
        features = _features_of(request, kind, of_all, is_local=False)
        return _open_rows(request, kind, features, wanted)
    return datasets.load_dataset(name, config or None, split=request.split,
                                 streaming=request.streaming)


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
    """Tell whether the column holds lists of messages, or all its first rows JSON of these."""
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
        if all(isinstance(text, str) and chat_of_text(text) for text in texts):
            return bool(texts)
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
        _check_dtype(source, feature, text_key)


def _check_dtype(source, feature, text_key):
    if getattr(feature, "dtype", None) not in STRINGS:
        raise DataError(
            f"--data {source}: column {text_key!r} holds {checks.name_of_type(feature)}, expected "
            "text or chats as lists of role and content; repair it or name another column with "
            "--text_key")
