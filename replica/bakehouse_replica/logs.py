"""Our log records in a Serve process."""

import logging


def write_to_serve_log(package: str) -> None:
    """Send the package's records, from INFO on, to the file where Serve writes this replica's own.

    Otherwise they would go to the worker's standard error, and only from WARNING on.
    """
    ours = logging.getLogger(package)
    ours.handlers = logging.getLogger("ray.serve").handlers  # the same list, so that a reconfiguration is followed
    ours.propagate = False
    ours.setLevel(logging.INFO)
