"""Read several files as one data set: their splits, and columns that have to be alike.

Tests: tests/test_open_data.py, tests/test_column_types.py.
"""

import os
import re
from pathlib import Path

import datasets

from isogloss.data import checks
from isogloss.data.open_data import STRINGS, lacks
from isogloss.errors import DataError

# What `datasets` writes beside data.
OF_DATASETS = "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"


def files_below(folder):
    """List the files of data in a directory and those inside, sorted; what is hidden is none."""
    files = set()
    for file in Path(folder).rglob("*"):
        is_hidden = any(name.startswith(".") for name in file.relative_to(folder).parts)
        is_data = checks.kind_of(str(file)) and file.name not in OF_DATASETS
        if is_data and not is_hidden and not file.is_dir():
            files.add(str(file))
    # a compressed file beside what it was made from is a copy
    return sorted(file for file in files if os.path.splitext(file)[0] not in files)


def splits_of(path, files):
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


def named_splits(request, splits):
    """Return the splits that a --split names; see `open_data.names_of_splits`."""
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
            raise DataError(f"--split {request.split}: {source} has no split {name!r}; it has "
                            f"{', '.join(splits)}")
    if is_part and request.streaming:
        raise DataError(f"--split {request.split}: a stream has no parts; name whole splits, or "
                        "leave out --streaming")
    return list(dict.fromkeys(names))


def check_alike(request, columns_of_files, is_json):
    """Raise a DataError where a file, of {file: {column: type}}, differs from the first."""
    (first_file, first), *others = columns_of_files.items()
    needed = (request.text_key, *request.json_keys, *request.plain_keys)
    optional = () if is_json else request.optional_keys
    for file, columns in others:
        for name in needed:
            if name not in columns:
                raise DataError(lacks(request, f"{request.source}: {file}", name, columns))
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
