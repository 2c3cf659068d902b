from __future__ import annotations

import pytest

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.manifest import check_manifest, make_manifest, manifest_digest

ENTRY = TensorEntry(name="a", dtype="float32", shape=(2, 3), nbytes=24, digest="d" * 32)


def _manifest(*entries: TensorEntry) -> Manifest:
    return make_manifest(1, 0, TransportKind.SHM, "x", entries)


@pytest.mark.parametrize("change", [{"name": "b"}, {"dtype": "int32"}, {"shape": (3, 2)}, {"digest": "e" * 32}])
def test_digest_covers_each_field(change: dict[str, object]) -> None:
    assert manifest_digest([ENTRY]) != manifest_digest([ENTRY.model_copy(update=change)])


def test_digest_covers_order_and_has_no_ambiguous_joins() -> None:
    other = ENTRY.model_copy(update={"name": "b"})
    assert manifest_digest([ENTRY, other]) != manifest_digest([other, ENTRY])
    left = [ENTRY.model_copy(update={"name": "af", "dtype": "loat32"})]
    assert manifest_digest(left) != manifest_digest([ENTRY])


def test_a_sound_manifest_passes() -> None:
    check_manifest(_manifest(ENTRY))


@pytest.mark.parametrize(
    ("manifest", "complaint"),
    [
        (_manifest(), "no tensors"),
        (_manifest(ENTRY, ENTRY), "'a' is listed twice"),
        (_manifest(ENTRY.model_copy(update={"dtype": "complex64"})), "dtype 'complex64'"),
        (_manifest(ENTRY.model_copy(update={"nbytes": 20})), "has 24 bytes, the manifest says 20"),
        (_manifest(ENTRY.model_copy(update={"shape": (-2, -3)})), "tensor 'a'"),
        (_manifest(ENTRY).model_copy(update={"digest": "0" * 32}), "does not cover its entries"),
    ],
)
def test_contradictions_are_named(manifest: Manifest, complaint: str) -> None:
    with pytest.raises(WeightUpdateError, match=complaint):
        check_manifest(manifest)
