"""Entry point of the ``refcache`` command.

Exit codes: 0 all is well, 1 a violation, 2 the call was wrong, 3 nothing worse than unknown,
130 interrupted. A refusal is one line on stderr; there is no traceback (``REFCACHE_TRACEBACK=1``
asks for one).
"""

import os
import sys
import tempfile
import traceback

import typer

from refcache import __version__
from refcache.cli.campaign import campaign
from refcache.cli.check import check
from refcache.cli.convert import convert
from refcache.cli.explore import explore
from refcache.cli.planted import misuse, planted
from refcache.cli.replay import replay
from refcache.cli.traces import judge, shrink
from refcache.cli.tune import tune
from refcache.cli.workload import workload
from refcache.errors import RefcacheError

VERDICTS = (["check"], ["explore"], ["campaign"], ["judge"], ["replay"])
OK, VIOLATION, USAGE, UNKNOWN, INTERRUPTED = 0, 1, 2, 3, 130

# The base of all usage errors, wherever this typer keeps it.
UsageError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="refcache",
    help="Executable specification and correctness oracle of a hierarchical KV cache.",
    epilog="Exit codes: 0 ok, 1 a violation, 2 the call was wrong, 3 nothing worse than unknown.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    check, explore, campaign, replay, convert, judge, shrink, workload, planted, misuse, tune
):  # fmt: skip
    app.command()(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"refcache {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Executable specification and correctness oracle of a hierarchical KV cache."""


def main(arguments: list[str]) -> int:
    """Run the command line; returns its exit code and never raises."""
    try:
        code = app(arguments, prog_name="refcache", standalone_mode=False) or OK
        sys.stdout.flush()
        return int(code)
    except (BrokenPipeError, SystemExit) as error:
        # The reader left, as in `refcache planted | head -1`: typer makes a SystemExit of that.
        if not isinstance(error.__context__ or error, BrokenPipeError):
            return _refuse(f"the target called sys.exit({error})", UNKNOWN)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNKNOWN if arguments[:1] in VERDICTS else OK  # a verdict was not delivered
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except RefcacheError as error:
        return _refuse(str(error), USAGE)
    except UsageError as error:
        message: str = error.format_message()  # type: ignore[attr-defined]
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message, file=sys.stderr)
            return USAGE
        return _refuse(message, USAGE)
    except Exception as error:
        return _refuse(f"a fault of refcache itself: {type(error).__name__}: {error}", UNKNOWN)


def _refuse(message: str, code: int) -> int:
    if os.environ.get("REFCACHE_TRACEBACK"):
        traceback.print_exc()
    print("refcache:", " ".join(message.split()), file=sys.stderr)
    return code


def run() -> None:
    """The console script."""
    # Hypothesis keeps notes of the user's modules: not in the user's folder.
    notes = os.path.join(tempfile.gettempdir(), f"refcache-hypothesis-{os.getuid()}")
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", notes)
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
