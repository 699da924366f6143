"""The program `chaosrun`, also as `python -m chaosrun`."""

import sys


def main() -> int:
    """Its exit code. A Ctrl-C while the command line itself is imported is an interrupt like any later one."""
    try:
        from chaosrun.cli import main as command_line
    except KeyboardInterrupt:
        from chaosrun.errors import InterruptedRunError
        from chaosrun.report.output import report_error

        return report_error(sys.argv[1:], InterruptedRunError.__name__, "interrupted", None, InterruptedRunError.exit_code)
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
