"""Every planted kernel bug passes the smoke test and is caught by the cases."""

from types import SimpleNamespace

import pytest

from refcache.errors import InvalidArgument
from refcache.oracle.planted import kernels


@pytest.mark.parametrize("bug", kernels.BUGS, ids=lambda bug: bug.name)
def test_planted_kernel_bug_is_caught(kernel_ops: SimpleNamespace, bug: kernels.KernelBug) -> None:
    with bug.active():
        kernels.smoke(kernels.kernel_ops())
    assert kernels.first_error(bug) != ""


def test_the_kernels_themselves_pass(kernel_ops: SimpleNamespace) -> None:
    kernels.smoke(kernel_ops)
    assert list(kernels._far_pages()) == []


def test_a_bug_whose_line_is_gone_says_so(kernel_ops: SimpleNamespace) -> None:
    gone = kernels.KernelBug("gone", "slip", "", kernels.COPY, "no such line", "")
    with pytest.raises(InvalidArgument, match="0 times"), gone.active():
        pass
