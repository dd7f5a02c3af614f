"""The unified radix tree of later releases: the target, its views, its calls, its two cores."""
