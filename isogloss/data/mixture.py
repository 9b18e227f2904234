"""Say what --data names: one data set, or several with weights, see kinds/mixed.py.

Tests: tests/test_mixture.py.
"""

from dataclasses import dataclass
from zlib import crc32

from isogloss.flags.parse import check_flags, flag, is_table


@dataclass(kw_only=True)
class SourceOptions:
    """Hold what an entry of --data may say that is no flag.

    Attributes:
        tools_key: column of the tools that the assistant of a chat may call, if there is one, which
            every chat template is shown.
        weight_key: column of a number for each row, 0 or more, of --token_weights column.
        drop_images: learn the text of chats with images or sounds, which are refused otherwise.
        txt_samples: what a sample of a .txt file is: line, paragraph (between empty lines) or file.
    """

    tools_key: str = "tools"
    weight_key: str = ""
    drop_images: bool = False
    txt_samples: str = flag("line", "", choices=("line", "paragraph", "file"))

    def __post_init__(self):
        try:
            check_flags(self)
        except ValueError as error:
            raise ValueError(f"--data: {str(error).removeprefix('--')}") from None


@dataclass
class Source:
    """Describe one data set of a run.

    Attributes:
        name: of it in metrics; empty: it is the only one.
        cfg: Config of a run on it alone.
        weight: how many samples it gives, beside those of the others; None: as many as it has.
        route: value by which its rows choose teachers; an Ellipsis: a column does, or nothing.
    """

    name: str
    cfg: object
    weight: float | None = None
    route: object = ...

    @property
    def chooses(self):
        return self.route is not ... or bool(self.cfg.route_key)


def sources_of(cfg):
    """Return the Sources of --data.

    Raises:
        ValueError: it is no such list, or an entry is wrong.
    """
    if not is_table(cfg.data):
        return [Source("", cfg)]
    from isogloss.data.kinds.mixed import listed_sources

    return listed_sources(cfg)


def seed_of(source, seed):
    """Return the seed of a source's own order: others of equal length are shuffled otherwise."""
    return crc32(f"{seed} {source.name}".encode()) if source.name else seed
