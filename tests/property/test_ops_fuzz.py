"""Shapes, strides, dtypes and devices of the ops, drawn: the kernels do as the reference."""

import random
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from ops_fuzz import WRONG, WRONG_ALLOC, Call

REPEATABLE = settings(max_examples=50, deadline=None, derandomize=True, database=None)


@REPEATABLE
@given(rng=st.randoms(use_true_random=False))
def test_drawn_calls_do_as_the_reference(kernel_ops: SimpleNamespace, rng: random.Random) -> None:
    Call(rng).check(kernel_ops)


def test_every_kind_of_wrong_call_is_drawn_and_refused(kernel_ops: SimpleNamespace) -> None:
    rng, met = random.Random(1), {"done": 0, "refused": 0}
    wrong: set[str] = set()
    for _ in range(250):
        call = Call(rng)
        found = call.check(kernel_ops)
        met[found] += 1
        assert found == "refused" or not call.wrong, call
        wrong |= {call.wrong} - {""}
    assert wrong == {*WRONG, *WRONG_ALLOC}
    assert min(met.values()) > 60
