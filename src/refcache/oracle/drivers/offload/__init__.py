"""Drives offloading managers: jobs of both ways, open side by side, and what each may see."""
