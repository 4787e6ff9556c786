"""``python -m hororing stragglers timeline.json``."""

from __future__ import annotations

import argparse
import json
import sys

from hororing.toolkit.stragglers.arrivals import read_timeline
from hororing.toolkit.stragglers.diagnosis import diagnose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("timeline", help="what HORORING_TIMELINE or start_timeline() wrote")
    parser.add_argument(
        "--tolerance-ms",
        type=float,
        help="how far behind the others is late (default: a tenth of the step, 1 ms at least)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(chosen: argparse.Namespace) -> int:
    """Print the report. 1: the file has no usable data."""
    tolerance_s = None if chosen.tolerance_ms is None else chosen.tolerance_ms * 1e-3
    try:
        diagnosis = diagnose(read_timeline(chosen.timeline), tolerance_s)
    except FileNotFoundError as error:
        print(f"{error}; did the job set HORORING_TIMELINE?", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(diagnosis.as_dict(), indent=1) if chosen.json else diagnosis)
    return 0
