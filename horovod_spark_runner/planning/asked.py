"""What is asked of a plan besides the training itself, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidInputError, brief
from ..settings.kinds import check_count, check_flag
from .links import Link, link_of, link_text

RANKS = tuple(2**exponent for exponent in range(13))
NETWORKS = ("1gbit", "10gbit", "100gbit")
SAMPLE_ROWS = 100_000


@dataclass(frozen=True)
class Asked:
    """What a plan is to tell; see `plan_training`.

    Raises:
        InvalidInputError: a value cannot be right.
    """

    networks: Sequence[str | Link] = NETWORKS
    ranks: Sequence[int] = RANKS
    ranks_per_host: int | None = None
    cores_per_host: int | None = None
    batch_sizes: Sequence[int] | None = None
    sample_rows: int = SAMPLE_ROWS
    noise_scale: bool = False

    def __post_init__(self) -> None:
        named_links(self.networks)
        check_counts("ranks", self.ranks)
        for name in ("ranks_per_host", "cores_per_host"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.batch_sizes is not None:
            check_counts("batch_sizes", self.batch_sizes)
        check_count("sample_rows", self.sample_rows)
        check_flag("noise_scale", self.noise_scale)

    def sizes(self, batch_size: int) -> list[int]:
        """Return the batch sizes to measure a step with, that of the training the first."""
        given = self.batch_sizes
        others = [max(1, batch_size // 4), 2 * batch_size] if given is None else given
        return list(dict.fromkeys([batch_size, *others]))


def named_links(networks: Sequence[str | Link]) -> list[tuple[str, Link]]:
    """Return the networks with their names.

    Raises:
        InvalidInputError: one is none.
    """
    if isinstance(networks, (str, Link)) or not isinstance(networks, Sequence):
        raise InvalidInputError(f"networks must be a list, got {brief(networks)}")
    if not networks:
        raise InvalidInputError(
            "networks is an empty list; name those to plan for, such as ['10gbit'], or leave it out"
        )
    links = [link_of(given) for given in networks]
    return [
        (given if isinstance(given, str) else link_text(link), link)
        for given, link in zip(networks, links, strict=True)
    ]


def check_counts(name: str, given: object) -> list[int]:
    """Return whole numbers of 1 and more, as they are given.

    Raises:
        InvalidInputError: they are something else.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidInputError(f"{name} must be a list of whole numbers, got {brief(given)}")
    return [check_count(f"{name}[{index}]", one) for index, one in enumerate(given)]
