"""Every test starts from the same signals, however pytest was started."""

import signal


def pytest_configure() -> None:
    """A job in a shell's background inherits an ignored SIGINT, and so do the processes it starts: the tests
    of an interrupt would wait for one that never comes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
