"""The first bytes of an HTTP/2 connection: SETTINGS are acknowledged in the caller's place."""

from __future__ import annotations

import random
import struct

import pytest

from gateway.grpc.relay import ACKNOWLEDGED, MAX_BYTES, MAX_FRAMES, SettingsOpening

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


OWN = PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20))
EARLY = frame(HEADERS, 4, 1, b"h" * 300) + frame(DATA, 1, 1, b"d" * 70) + frame(PING, 1, 0, bytes(8))
ACK = frame(SETTINGS, 1, 0)
LATER = frame(HEADERS, 4, 3, b"x" * 40) + ACK + frame(SETTINGS, 0, 0)


def passed(*pieces: bytes) -> bytes:
    opening = SettingsOpening()
    return b"".join(opening.passes(piece) for piece in pieces)


def test_the_first_acknowledgement_moves_behind_the_callers_settings() -> None:
    said = OWN + EARLY + ACK + LATER
    meant = OWN + ACK + EARLY + LATER
    assert ACK == ACKNOWLEDGED
    assert passed(said) == meant
    assert all(passed(said[:cut], said[cut:]) == meant for cut in range(len(said)))
    assert passed(*(said[i : i + 1] for i in range(len(said)))) == meant
    rng = random.Random(3)
    for _ in range(200):
        cuts = sorted(rng.choices(range(len(said)), k=rng.randint(1, 12)))
        assert passed(*(said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True))) == meant


def test_empty_settings_are_settings() -> None:
    assert passed(PREFACE + frame(SETTINGS, 0, 0) + ACK) == PREFACE + frame(SETTINGS, 0, 0) + ACK


@pytest.mark.parametrize("first", [frame(HEADERS, 4, 1, b"h"), ACK, frame(SETTINGS, 1, 0, bytes(6))])
def test_a_beginning_that_no_server_takes_passes_as_it_is(first: bytes) -> None:
    assert passed(PREFACE + first + ACK, ACK) == PREFACE + first + ACK + ACK


def test_an_acknowledgement_that_says_something_is_left_to_the_server() -> None:
    wrong = frame(SETTINGS, 1, 0, bytes(6))
    assert passed(OWN + wrong + ACK) == OWN + ACK + wrong


def test_what_comes_without_an_acknowledgement_is_bounded() -> None:
    opening = SettingsOpening()
    opening.passes(OWN)
    block = frame(DATA, 0, 1, bytes(1 << 14))
    fit = (MAX_BYTES - len(OWN)) // len(block)
    for _ in range(fit):
        assert opening.passes(block) == block
    with pytest.raises(ValueError, match="no acknowledgement of SETTINGS"):
        opening.passes(block)
    acknowledged = SettingsOpening()
    acknowledged.passes(OWN + ACK)
    for _ in range(2 * fit):
        assert acknowledged.passes(block) == block


def test_frames_without_an_acknowledgement_are_bounded() -> None:
    """Each costs a look, however small it is."""
    opening = SettingsOpening()
    opening.passes(OWN)
    unknown = frame(99, 0, 0)
    assert opening.passes(unknown * (MAX_FRAMES - 1)) == unknown * (MAX_FRAMES - 1)
    with pytest.raises(ValueError, match="frames came, and no acknowledgement of SETTINGS"):
        opening.passes(unknown)
