"""Open what is not in files of this machine: data sets of the hub, addresses, save_to_disk.

Tests: tests/test_open_data.py.
"""

import glob
import itertools

import datasets
import fsspec

from isogloss.data.open_data import features_of, names_of_splits, open_splits, part_of
from isogloss.errors import DataError

# What the names of builders of the hub begin with -> our reader.
READERS_OF_HUB = {"Json": "json", "Csv": "csv"}


def files_at(address):
    """List the files at an address; those of the hub may be named by a glob."""
    if address.startswith(("http://", "https://")) or not glob.has_magic(address):
        return [address]
    filesystem, path = fsspec.core.url_to_fs(address)
    files = [filesystem.unstrip_protocol(file) for file in filesystem.glob(path)]
    if not files:
        raise DataError(f"--data {address}: no file matches")
    return sorted(files)


def open_saved(request, path):
    """Open a directory of save_to_disk, of one data set or of several splits."""
    by_split = datasets.load_from_disk(path)
    if isinstance(by_split, datasets.Dataset):  # "train", which is the default, means all of it too
        by_split = {"train": by_split, str(by_split.split or "train"): by_split}
    names_of_splits(request, by_split)  # which refuses those that are not there
    dataset = part_of(by_split, request.split)
    return dataset.to_iterable_dataset() if request.streaming else dataset


def open_hub(request):
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
        wanted = {split: splits[split] for split in names_of_splits(request, splits)}
        of_all = list(itertools.chain.from_iterable(wanted.values()))
        features = features_of(request, kind, of_all, is_local=False)
        return open_splits(request, kind, features, wanted)
    return datasets.load_dataset(name, config or None, split=request.split,
                                 streaming=request.streaming)
