"""From a name such as ``sglang:0.5.10+overlap`` to the release as a target."""

from refcache.errors import InvalidArgument
from refcache.oracle.target.base import Target
from refcache.peers.releases import VARIANTS, VERSIONS, refuse_unless_installed, unpacked


def peer_target(spec: str) -> Target:
    """The target named ``sglang``, ``sglang:VERSION`` or ``sglang:VERSION+VARIANT``.

    Raises:
        InvalidArgument: another form, or a release that the adapters do not know.
        MissingExtra: the release is not unpacked, or lacks a package.
    """
    engine, _, rest = spec.partition(":")
    version, _, variant = rest.partition("+")
    if not version:
        version = (unpacked() or VERSIONS)[-1]
    if engine != "sglang" or version not in VERSIONS or variant not in VARIANTS:
        raise InvalidArgument(
            f"target {spec!r}: expected sglang, sglang:VERSION or sglang:VERSION+VARIANT; VERSION "
            f"one of {', '.join(VERSIONS)}, VARIANT one of {', '.join(filter(None, VARIANTS))}"
        )
    if variant == "rust" and version != "0.5.23":
        raise InvalidArgument(f"target {spec!r}: sglang {version} has no Rust core; 0.5.23 has")
    refuse_unless_installed(version)
    if version == "0.5.23":
        from refcache.peers.unified.target import UnifiedTarget

        return UnifiedTarget(version, variant)
    from refcache.peers.sglang import SglangTarget

    return SglangTarget(version, variant)
