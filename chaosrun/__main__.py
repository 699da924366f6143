"""The program `chaosrun`, also as `python -m chaosrun`."""

import sys


def main() -> int:
    """Its exit code. A Ctrl-C while the command line itself is imported is an interrupt like any later one."""
    try:
        from chaosrun.cli import main as command_line
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        from chaosrun.report.output import asks_for_json, write_json

        if asks_for_json(sys.argv[1:]):
            about = {"kind": "InterruptedRunError", "message": "interrupted", "hint": None, "exit_code": 130}
            write_json({"v": 1, "error": about})
        return 130
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
