from collections.abc import Sequence

def copy(
    targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], origin: int, /
) -> int: ...
def guard(addresses: Sequence[int], sizes: Sequence[int], origin: int, /) -> int: ...
def record(
    target: int,
    source: int,
    size: int,
    cursor: int,
    opening: bytes,
    when: float,
    kind: int,
    arena: int,
    offset: int,
    /,
) -> None: ...
def statistics(
    addresses: Sequence[int],
    counts: Sequence[int],
    dtypes: Sequence[str],
    out: int,
    stride: int,
    /,
) -> None: ...
def fingerprint(
    addresses: Sequence[int],
    counts: Sequence[int],
    dtypes: Sequence[str],
    firsts: Sequence[int],
    /,
) -> list[int]: ...
def populate(address: int, nbytes: int, /) -> None: ...
def use(variant: str, /) -> None: ...
def variants() -> tuple[str, ...]: ...
