"""What is printed, without regard to where lines break."""


def words(x: object) -> str:
    """``str(x)`` as one line."""
    return " ".join(str(x).split())
