"""All orders of small programs: their number is the closed form, and no order is run twice."""

from math import comb

import pytest

from refcache.errors import InvalidArgument
from refcache.runtime import SimulatedRuntime, all_orders, lazy


def nothing():
    pass


def chains(*lengths):
    def program(machine):
        for chain, length in enumerate(lengths):
            with machine.stream(machine.Stream()):
                for number in range(length):
                    machine.launch(f"{chain}.{number}", nothing)

    return program


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 3), (3, 3), (1, 5), (6, 0)])
def test_two_independent_chains_have_m_plus_n_over_m_orders(m, n):
    orders = list(all_orders(chains(m, n)))
    assert len(orders) == len(set(orders)) == comb(m + n, m)


def test_three_independent_chains_have_the_multinomial_number_of_orders():
    orders = list(all_orders(chains(2, 2, 2)))
    assert len(orders) == len(set(orders)) == comb(6, 2) * comb(4, 2)


def test_fork_and_join_has_the_orders_of_its_middle():
    def program(machine):
        left, right = machine.Stream(), machine.Stream()
        machine.launch("fork", nothing)
        for stream in (left, right):
            stream.wait_stream(machine.default_stream())
            with machine.stream(stream):
                machine.launch(f"{stream}.0", nothing)
                machine.launch(f"{stream}.1", nothing)
        for stream in (left, right):
            machine.default_stream().wait_stream(stream)
        machine.launch("join", nothing)

    orders = list(all_orders(program))
    assert len(orders) == len(set(orders)) == comb(4, 2)
    assert all(order[0] == "fork" and order[-1] == "join" for order in orders)


def test_host_wait_in_the_middle_orders_what_is_issued_after_it():
    def program(machine):
        side, other = machine.Stream(), machine.Stream()
        with machine.stream(side):
            machine.launch("a", nothing)
        with machine.stream(other):
            machine.launch("b", nothing)
        side.synchronize()
        machine.launch("c", nothing)

    # a before c; b anywhere.
    assert sorted(all_orders(program)) == [("a", "b", "c"), ("a", "c", "b"), ("b", "a", "c")]


def test_query_is_run_for_both_answers():
    answers = []

    def program(machine):
        event = machine.Event()
        machine.launch("a", nothing)
        event.record()
        answers.append(event.query())
        machine.launch("b" if answers[-1] else "not yet", nothing)

    assert list(all_orders(program)) == [("a", "b"), ("a", "not yet")]
    assert answers == [True, False]


def test_query_and_order_are_combined_once_each():
    seen = []

    def program(machine):
        with machine.stream(machine.Stream()):
            machine.launch("x", nothing)
        event = machine.Event()
        for name in "ab":
            machine.launch(name, nothing)
        event.record()
        seen.append(event.query())

    runs = [(order, seen[-1]) for order in all_orders(program)]
    # x before, between or after a and b; for each, the query comes early or late.
    assert len(runs) == len(set(runs)) == 6


def test_empty_program_has_one_order():
    assert list(all_orders(lambda machine: None)) == [()]


def test_more_launches_than_can_be_enumerated_are_refused():
    with pytest.raises(InvalidArgument, match="7 launches"):
        list(all_orders(chains(4, 3)))


def test_any_result_of_a_racy_program_is_reached():
    results = set()

    def program(machine):
        cell = [0]
        for value in (1, 2):
            with machine.stream(machine.Stream()):
                machine.launch(f"write {value}", lambda v=value: cell.__setitem__(0, v))
        results.add(cell[0])
        machine.synchronize()
        results.add(cell[0])

    for _ in all_orders(program):
        pass
    assert results == {0, 1, 2}


def test_history_keeps_the_last_64_accesses():
    machine = SimulatedRuntime(lazy)
    for number in range(70):
        machine.launch(str(number), nothing)
    machine.synchronize()
    assert [access.name for access in machine.history] == [str(n) for n in range(6, 70)]
