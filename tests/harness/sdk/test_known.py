"""Names that a plug-in looks up: an unknown one is reported together with the known ones."""

from __future__ import annotations

import pytest

from harness.sdk.known import Known


def test_an_unknown_name_is_reported_with_the_known_ones() -> None:
    ports = Known("port", {"client": 7000, "peer": 7001})
    assert (ports["peer"], ports.get("clinet"), dict(ports)) == (7001, None, {"client": 7000, "peer": 7001})
    with pytest.raises(KeyError) as caught:
        ports["clinet"]
    assert str(caught.value) == "there is no port 'clinet' (did you mean client?); there are client, peer"


def test_an_unknown_name_among_none_is_reported() -> None:
    with pytest.raises(KeyError, match=r"^there is no setting 'ack'; there are none$"):
        Known[str]("setting", {})["ack"]
