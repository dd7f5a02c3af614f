"""Storage backends on trial: the contract ``storage``."""
