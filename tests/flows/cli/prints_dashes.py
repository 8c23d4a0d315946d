"""Module whose `main` prints characters that ASCII lacks."""


def main() -> None:
    print("layers 0–2 ░░")
