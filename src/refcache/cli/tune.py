"""``refcache tune``: measure which way copies should go on the card that is here."""

from pathlib import Path
from typing import Annotated

import typer

from refcache.errors import InvalidArgument


def tune(
    output: Annotated[Path, typer.Option(help="The file that keeps the rules, for each card.")] = (
        Path("transfer-rules.json")
    ),
) -> int:
    """Measure the transfer rules of this CUDA card, in a few seconds, and save them.

    Which copies go by the copy engine and which by a kernel, and how many programs a kernel may
    take beside a model.
    """
    import torch

    from refcache.controller import tuning
    from refcache.pool.transfer_rule import RULES_FILE, save, saved_in

    saved_in(output)  # refused before the work

    if not torch.cuda.is_available():
        raise InvalidArgument("tune without a CUDA device: expected one, its rules are measured")
    card = torch.cuda.get_device_name()
    rules = tuning.rules_from(tuning.measure(print))
    save(output, card, rules)
    for rule in rules:
        print(rule)
    print(f"{output}: rules of {card}; they are used with {RULES_FILE}={output} set")
    return 0
