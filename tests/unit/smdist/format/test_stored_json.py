"""What a run stores as JSON: damage, and a place that is not its own, are noticed and named."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from smdist.errors import CorruptObject
from smdist.format.manifest import Run
from smdist.format.stored_json import decode, encode

RUN = Run("id", 1.5, "pytörch")
DATA = encode(RUN, "run.json")


def test_stored_json_round_trips() -> None:
    assert decode(DATA, Run, "run.json") == RUN
    plain = json.loads(DATA)
    assert (plain["run_id"], plain["framework"]) == ("id", "pytörch")
    assert list(plain)[-1] == "crc32c"


def test_every_flipped_bit_is_detected() -> None:
    for at in range(8 * len(DATA)):
        damaged = bytearray(DATA)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(CorruptObject, match=r"run\.json"):
            decode(bytes(damaged), Run, "run.json")


def test_every_truncation_and_addition_is_detected() -> None:
    for data in [*(DATA[:end] for end in range(len(DATA))), DATA + b" ", DATA + DATA, DATA[1:]]:
        with pytest.raises(CorruptObject):
            decode(data, Run, "run.json")


def test_object_under_another_key_is_rejected() -> None:
    with pytest.raises(CorruptObject, match="another key"):
        decode(DATA, Run, "sessions/run.json")


class _Any(msgspec.Struct):
    a: object


@pytest.mark.parametrize("text", [b'{"a":' + b"[" * 100_000, b'{"a":"\xff"', b'{"b":1', b"[1", b""])
def test_invalid_content_with_valid_checksum_is_corrupt(text: bytes) -> None:
    import google_crc32c

    checksum = google_crc32c.value(b"key" + text)
    with pytest.raises(CorruptObject, match="key"):
        decode(text + b',"crc32c":"%08x"}' % checksum, _Any, "key")


def test_random_bytes_are_corrupt() -> None:
    chance = random.Random(1)
    for _ in range(2000):
        with pytest.raises(CorruptObject):
            decode(chance.randbytes(chance.randrange(200)), Run, "run.json")
