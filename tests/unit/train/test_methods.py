"""Declarations of the trainer's methods, and the plain form of their arguments."""

from train_cases import random_batch

from areal_like.api.trajectory import UpdateReport
from areal_like.rpc.codec import decode, encode
from areal_like.train.methods import Collect, Split, method_forms


def test_the_declared_methods_and_how_they_are_spread():
    forms = method_forms()
    assert {name: (form.dispatch.split, form.dispatch.collect) for name, form in forms.items()} == {
        "coordinates": (Split.SAME, Collect.ALL),
        "update": (Split.BY_KEY, Collect.FIRST),
        "export_weights": (Split.SAME, Collect.FIRST),
        "save_hf": (Split.SAME, Collect.FIRST),
        "save_snapshot": (Split.SAME, Collect.FIRST),
        "finish_snapshot": (Split.SAME, Collect.FIRST),
        "load_snapshot": (Split.SAME, Collect.FIRST),
    }


def test_a_batch_and_a_report_survive_the_socket():
    form = method_forms()["update"]
    batch, _ = random_batch()
    assert form.load(decode(encode(form.dump({"batch": batch})))) == {"batch": batch}
    report = UpdateReport(version=1, seconds=0.5, tokens=3, metrics={"a": float("inf")})
    assert form.result.validate_python(decode(encode(form.result.dump_python(report)))) == report
