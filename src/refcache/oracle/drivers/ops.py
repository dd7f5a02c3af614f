"""Drives ops: each step is one call on buffers of its own, compared byte for byte.

The cases are of :mod:`refcache.reference.cases`: what moves, the source, the bystanders and the
guards around every buffer are compared with what the reference does to an equal copy
(:mod:`refcache.reference.case_check`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from refcache.oracle.program.driver import Driver, step
from refcache.oracle.rules.violation import Violation
from refcache.oracle.target.base import Target
from refcache.oracle.target.config import CacheConfig
from refcache.oracle.target.ops import OPS, device, takes_cursor
from refcache.reference import alloc_cases, case_check, cases
from refcache.reference.alloc_cases import AllocCase
from refcache.reference.case_check import Placement
from refcache.reference.cases import TransferCase


@dataclass(frozen=True)
class OpsConfig(CacheConfig):
    """Nothing to choose: a case has all of it."""

    size: int = 1


class OpsDriver(Driver):
    """Calls the ops of a target (capability ``ops``); those it lacks are not asked."""

    needs = frozenset({"ops"})
    Config = OpsConfig

    def __init__(self, target: Target, **config: Any) -> None:
        super().__init__(target, **config)
        self.ops = target.ops()
        self.device = device()
        on_card = self.device == "cuda"
        self.place = Placement(self.device, torch.Tensor.pin_memory if on_card else torch.clone)
        self.settle: Callable[[], Any] = torch.cuda.synchronize if on_card else int

    @property
    def names(self) -> list[str]:
        """The ops that are on trial."""
        return [op for op in OPS if hasattr(self.ops, op)]

    @step
    def transfer(self, case: TransferCase) -> None:
        """One copy, of the nearest case that the target can express; nothing if it lacks the op."""
        if hasattr(self.ops, case.op):
            case = self.target.adapt(case)
            self._ask(
                case.op, "OP1", case_check.transfer_errors, case, self.ops, self.place, self.settle
            )

    @step
    def slots(self, case: AllocCase) -> None:
        """One ``alloc_extend`` or ``alloc_decode``; nothing with a cursor if the op takes none."""
        op = "alloc_decode" if case.prefix is None else "alloc_extend"
        function = getattr(self.ops, op, None)
        if function is not None and (case.cursor is None or takes_cursor(function)):
            self._ask(op, "OP2", alloc_cases.alloc_errors, case, self.ops, self.device)

    @step
    def far(self, op: str) -> None:
        """A copy of rows behind 2^31 elements (:func:`refcache.reference.cases.far_case`)."""
        case = cases.far_case(op)
        if hasattr(self.ops, op) and self.target.adapt(case) == case:
            self._ask(op, "OP1", case_check.far_errors, op, self.ops, self.device, self.settle)

    def _ask(self, op: str, rule: str, errors_of: Callable[..., list[str]], *args: Any) -> None:
        """Make one call; ``errors_of`` compares it, and an overflow of 32 bits is OP3."""

        def call() -> list[str]:
            try:
                return errors_of(*args)
            except Exception as error:
                if "int32 overflow" in repr(error):  # Triton's interpreter says so
                    raise Violation("OP3", f"{op}: {error}") from error
                raise

        call.__qualname__ = op
        errors = self.trial.call(call)
        self.trial.require(not errors, rule, f"{op}: {'; '.join(errors[:3])}")

    @step
    def wind_down(self) -> None:
        """Nothing is left over: each call had buffers of its own."""

    def describe(self) -> str:
        return f"on trial: {', '.join(self.names)}, tensors on {self.device}"

    def program(self) -> list[str]:
        return [
            "import torch",
            "from refcache.oracle import AllocCase, TransferCase",
            *super().program(),
        ]
