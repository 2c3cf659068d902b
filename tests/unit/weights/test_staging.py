from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from areal_like.api.weights import Manifest, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.manifest import make_manifest
from areal_like.weights.segment_layout import HEADER_BYTES
from areal_like.weights.segments import segment_path
from areal_like.weights.staging import StagedWeights
from areal_like.weights.transports.base import WeightWriter

Tensors = dict[str, torch.Tensor]
NewModel = Callable[[Tensors], Tensors]


@pytest.fixture
def writer(kind: TransportKind, new_writer: Callable[..., WeightWriter]) -> Iterator[WeightWriter]:
    made = new_writer(kind)
    yield made
    made.close()


@pytest.fixture
def shm(new_writer: Callable[..., WeightWriter]) -> Iterator[WeightWriter]:
    made = new_writer(TransportKind.SHM)
    yield made
    made.close()


def _bytes(model: Tensors) -> dict[str, bytes]:
    return {name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in model.items()}


def test_nothing_changes_before_the_commit_and_everything_after(
    writer: WeightWriter, tensors: Tensors, zeros_like: NewModel
) -> None:
    model = zeros_like(tensors)
    addresses = {name: t.data_ptr() for name, t in model.items()}
    staged = StagedWeights(model)
    before = _bytes(model)
    manifest = writer.write(1, 0, tensors.items())
    report = staged.stage(manifest)
    assert (report.version, staged.staged_version, staged.report) == (1, 1, report)
    assert _bytes(model) == before
    assert staged.digest() != manifest.digest
    staged.commit(1)
    assert _bytes(model) == _bytes(tensors)
    assert {name: t.data_ptr() for name, t in model.items()} == addresses
    assert staged.digest() == manifest.digest
    assert staged.staged_version is None


def test_versions_follow_each_other(writer: WeightWriter, tensors: Tensors, zeros_like: NewModel) -> None:
    model = zeros_like(tensors)
    staged = StagedWeights(model)
    for version in range(4):
        new = {name: t + version for name, t in tensors.items()} | {"head": tensors["embed"] + version}
        manifest = writer.write(version, 0, new.items())
        staged.stage(manifest)
        staged.commit(version)
        assert staged.digest() == manifest.digest
        assert torch.equal(model["head"], tensors["embed"] + version)


def test_a_tie_is_transferred_once_and_both_views_change(
    writer: WeightWriter, tensors: Tensors, zeros_like: NewModel
) -> None:
    model = zeros_like(tensors)
    staged = StagedWeights(model)
    report = staged.stage(writer.write(1, 0, tensors.items()))
    assert report.bytes == 50 * 33 * 4 + 33 * 2 + 17 * 8 + 4
    staged.commit(1)
    assert torch.equal(model["embed"], tensors["embed"])
    assert model["head"].data_ptr() == model["embed"].data_ptr()


@pytest.mark.parametrize("listed", [["embed"], ["head"], ["embed", "head"]])
def test_a_manifest_may_list_any_name_of_a_tie(shm: WeightWriter, listed: list[str]) -> None:
    shared = torch.zeros(4)
    staged = StagedWeights({"embed": shared, "head": shared})
    new = torch.arange(4.0)
    manifest = shm.write(1, 0, [(name, new) for name in listed])
    staged.stage(manifest)
    staged.commit(1)
    assert shared.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert staged.digest() == manifest.digest


def test_untied_here_but_one_name_in_the_manifest_is_a_missing_tensor(shm: WeightWriter) -> None:
    staged = StagedWeights({"embed": torch.zeros(4), "head": torch.zeros(4)})
    with pytest.raises(WeightUpdateError, match="'head' is missing"):
        staged.stage(shm.write(1, 0, [("embed", torch.ones(4))]))


def test_tied_here_but_two_contents_in_the_manifest_is_refused(shm: WeightWriter) -> None:
    shared = torch.zeros(4)
    staged = StagedWeights({"embed": shared, "head": shared})
    manifest = shm.write(1, 0, [("embed", torch.ones(4)), ("head", torch.zeros(4))])
    with pytest.raises(WeightUpdateError, match="'embed' and 'head' are tied here"):
        staged.stage(manifest)


def test_a_tie_that_broke_after_construction_is_updated_whole_and_seen(shm: WeightWriter) -> None:
    embed, head = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    head.data = embed.data
    staged = StagedWeights({"embed": embed, "head": head})
    manifest = shm.write(1, 0, [("embed", torch.ones(4))])
    staged.stage(manifest)
    head.data = torch.zeros(4)
    staged.commit(1)
    assert head.tolist() == [1.0] * 4
    assert staged.digest() == manifest.digest
    with torch.no_grad():
        head[2] = 0.5
    assert staged.digest() != manifest.digest


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"norm": None}, "'norm' is missing"),
        ({"extra": torch.zeros(1)}, "the model has no tensor 'extra'"),
        ({"norm": torch.zeros(34, dtype=torch.bfloat16)}, r"'norm' has shape \(34,\), the model's is \(33,\)"),
        ({"ids": torch.zeros(17, dtype=torch.int32)}, "'ids' has dtype int32, the model's is int64"),
        ({"ids": torch.zeros(17)}, "'ids' has dtype float32"),
    ],
)
def test_a_wrong_tensor_is_named_and_the_live_weights_are_untouched(
    shm: WeightWriter, tensors: Tensors, zeros_like: NewModel, change: dict[str, torch.Tensor | None], complaint: str
) -> None:
    model = zeros_like(tensors)
    staged = StagedWeights(model)
    good = shm.write(1, 0, tensors.items())
    staged.stage(good)
    staged.commit(1)
    sent = {name: t for name, t in (tensors | change).items() if t is not None}
    with pytest.raises(WeightUpdateError, match=complaint):
        staged.stage(shm.write(2, 0, sent.items()))
    with pytest.raises(WeightUpdateError, match="stage the version first"):
        staged.commit(2)
    assert _bytes(model) == _bytes(tensors)
    assert staged.digest() == good.digest


def test_one_flipped_bit_in_the_segment_is_found_and_named(
    shm: WeightWriter, tensors: Tensors, zeros_like: NewModel
) -> None:
    model = zeros_like(tensors)
    staged = StagedWeights(model)
    manifest = shm.write(1, 0, tensors.items())
    path = segment_path(manifest.location)
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + 50 * 33 * 4 - 1] ^= 0x40
    path.write_bytes(raw)
    with pytest.raises(WeightUpdateError, match="tensor 'embed': its bytes have digest"):
        staged.stage(manifest)
    assert not any(t.any() for t in model.values())


def test_one_wrong_value_in_a_snapshot_is_found(new_writer: Callable[..., WeightWriter]) -> None:
    staged = StagedWeights({"a": torch.zeros(4)})
    manifest = new_writer(TransportKind.DISK).write(1, 0, [("a", torch.ones(4))])
    save_file({"a": torch.tensor([1.0, 1.0, 1.0, 1.0000001])}, Path(manifest.location) / "weights-00000.safetensors")
    with pytest.raises(WeightUpdateError, match="tensor 'a': its bytes"):
        staged.stage(manifest)


def test_digest_sees_every_live_tensor(shm: WeightWriter, tensors: Tensors, zeros_like: NewModel) -> None:
    model = zeros_like(tensors)
    staged = StagedWeights(model)
    manifest = shm.write(1, 0, tensors.items())
    staged.stage(manifest)
    staged.commit(1)
    for name in ("embed", "norm", "ids", "scale", "head"):
        raw = model[name].view(-1).view(torch.uint8)
        raw[-1] ^= 1
        assert staged.digest() != manifest.digest, name
        raw[-1] ^= 1
        assert staged.digest() == manifest.digest


def test_a_manifest_that_leaves_a_place_out_cannot_hide_it(shm: WeightWriter, tensors: Tensors) -> None:
    """A digest over fewer tensors would fit too; staging refuses before it comes to that."""
    staged = StagedWeights({"a": torch.zeros(2), "b": torch.zeros(2)})
    whole = shm.write(1, 0, [("a", torch.ones(2)), ("b", torch.ones(2))])
    part = make_manifest(1, 0, TransportKind.SHM, whole.location, whole.tensors[:1])
    with pytest.raises(WeightUpdateError, match="'b' is missing"):
        staged.stage(part)


def test_a_server_of_another_dtype_casts_and_its_receipt_is_still_evidence(shm: WeightWriter) -> None:
    sent = torch.tensor([1.0, 1.0 + 2**-10, -3.3])
    live = torch.zeros(3, dtype=torch.bfloat16)
    staged = StagedWeights({"a": live})
    manifest = shm.write(1, 0, [("a", sent)])
    staged.stage(manifest)
    staged.commit(1)
    assert live.tolist() == [1.0, 1.0, -3.296875]
    assert staged.digest() == manifest.digest
    live[1] = 1.0 + 2**-7
    assert staged.digest() != manifest.digest
    live[1] = 1.0
    assert staged.digest() == manifest.digest


def test_a_wider_live_dtype_casts_too(shm: WeightWriter) -> None:
    live = torch.zeros(2)
    staged = StagedWeights({"a": live})
    manifest = shm.write(1, 0, [("a", torch.tensor([0.5, -2.0], dtype=torch.bfloat16))])
    staged.stage(manifest)
    staged.commit(1)
    assert live.tolist() == [0.5, -2.0]
    assert staged.digest() == manifest.digest


def test_non_contiguous_live_tensors_are_filled_in_place(shm: WeightWriter) -> None:
    storage = torch.zeros(3, 2)
    staged = StagedWeights({"a": storage.t()})
    manifest = shm.write(1, 0, [("a", torch.arange(6.0).reshape(2, 3))])
    staged.stage(manifest)
    staged.commit(1)
    assert storage.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert staged.digest() == manifest.digest


def test_parameters_that_require_grad_are_committed_without_a_graph(shm: WeightWriter) -> None:
    layer = torch.nn.Linear(3, 2)
    staged = StagedWeights(dict(layer.named_parameters()))
    manifest = shm.write(1, 0, [("weight", torch.ones(2, 3)), ("bias", torch.zeros(2))])
    staged.stage(manifest)
    staged.commit(1)
    assert layer(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
    assert layer.weight.is_leaf and layer.weight.requires_grad


def test_commit_is_idempotent_and_refuses_what_is_not_staged(shm: WeightWriter) -> None:
    staged = StagedWeights({"a": torch.zeros(2)})
    with pytest.raises(WeightUpdateError, match="staged is None"):
        staged.commit(1)
    staged.stage(shm.write(1, 0, [("a", torch.ones(2))]))
    with pytest.raises(WeightUpdateError, match="staged is 1"):
        staged.commit(2)
    staged.commit(1)
    staged.commit(1)
    with pytest.raises(WeightUpdateError, match="commit of version 2"):
        staged.commit(2)


def test_discard_forgets_what_is_staged(shm: WeightWriter) -> None:
    live = torch.zeros(2)
    staged = StagedWeights({"a": live})
    staged.stage(shm.write(1, 0, [("a", torch.ones(2))]))
    staged.discard()
    with pytest.raises(WeightUpdateError, match="staged is None"):
        staged.commit(1)
    assert live.tolist() == [0.0, 0.0]


class _Gate(StagedWeights):
    """Holds a staging after its first tensor until told to go on."""

    reached: threading.Event
    go_on: threading.Event

    def _fetch(self, *arguments: object) -> None:
        super()._fetch(*arguments)  # type: ignore[arg-type]
        self.reached.set()
        assert self.go_on.wait(10)


def _hold(live: Tensors, manifest: Manifest) -> tuple[_Gate, threading.Thread, list[str]]:
    gate = _Gate(live)
    gate.reached, gate.go_on = threading.Event(), threading.Event()
    outcome: list[str] = []

    def stage() -> None:
        try:
            gate.stage(manifest)
            outcome.append("staged")
        except WeightUpdateError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=stage)
    thread.start()
    assert gate.reached.wait(10)
    return gate, thread, outcome


def test_a_second_staging_and_a_commit_are_refused_while_one_runs(shm: WeightWriter) -> None:
    manifest = shm.write(1, 0, [("a", torch.ones(2)), ("b", torch.ones(2))])
    gate, thread, outcome = _hold({"a": torch.zeros(2), "b": torch.zeros(2)}, manifest)
    for action in (lambda: gate.stage(manifest), lambda: gate.commit(1)):
        with pytest.raises(WeightUpdateError, match="another stage or commit runs"):
            action()
    gate.go_on.set()
    thread.join(10)
    assert outcome == ["staged"]


def test_discard_ends_a_staging_under_way(shm: WeightWriter) -> None:
    manifest = shm.write(1, 0, [("a", torch.ones(2)), ("b", torch.ones(2))])
    gate, thread, outcome = _hold({"a": torch.zeros(2), "b": torch.zeros(2)}, manifest)
    gate.discard()
    gate.go_on.set()
    thread.join(10)
    assert outcome == ["version 1: staging was discarded"]
    assert gate.staged_version is None


def test_before_the_first_commit_the_digest_covers_the_live_tensors() -> None:
    live = {"a": torch.zeros(2)}
    staged = StagedWeights(live)
    first = staged.digest()
    live["a"][0] = 1.0
    assert staged.digest() != first


@pytest.mark.parametrize("chunk_bytes", [8, 1000, 4096, 5000])
def test_chunks_and_buckets_may_end_anywhere(
    shm: WeightWriter, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr("areal_like.weights.digest.CHUNK_BYTES", chunk_bytes)
    sent = {str(n): torch.randn(n) for n in (1, 700, 3000, 33)}
    live = {name: torch.zeros_like(t) for name, t in sent.items()}
    staged = StagedWeights(live)
    staged.stage(shm.write(1, 0, sent.items()))
    staged.commit(1)
    assert _bytes(live) == _bytes(sent)


def test_memory_stays_flat_over_many_versions(writer: WeightWriter) -> None:
    sent = torch.zeros(2**20)
    staged = StagedWeights({"a": torch.zeros(2**20), "b": torch.zeros(2**20, dtype=torch.bfloat16)})

    def publish(version: int) -> int:
        staged.stage(writer.write(version, 0, [("a", sent + version), ("b", sent - version)]))
        staged.commit(version)
        return psutil.Process().memory_info().rss

    settled = max(publish(version) for version in range(5))
    grown = max(publish(version) for version in range(5, 30)) - settled
    assert grown < 2**24, "one tensor kept per version would be 50 MB and more"


def test_an_empty_model_is_refused() -> None:
    with pytest.raises(ValueError, match="empty mapping"):
        StagedWeights({})
