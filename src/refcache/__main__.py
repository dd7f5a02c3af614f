"""``python -m refcache`` is the ``refcache`` command."""

from refcache.cli.main import run

if __name__ == "__main__":
    run()
