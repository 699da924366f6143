"""What the raylet above this process was told on its command line."""

import psutil


def raylet_options() -> dict[str, str]:
    """By name, without dashes; empty where there is no raylet, or it is another user's."""
    try:
        raylet = next((parent for parent in psutil.Process().parents() if parent.name() == "raylet"), None)
        words = [] if raylet is None else raylet.cmdline()
    except psutil.Error:
        return {}
    return dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
