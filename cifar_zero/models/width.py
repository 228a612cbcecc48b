"""Networks as wide as a machine can bear."""


def scaled(channels: int, width: float) -> int:
    """Channels of a layer in a network that is `width` times as wide as the paper's, at least one."""
    return max(1, round(channels * width))
