"""Starts its ranks itself, as processes that multiprocessing forks: their exit handlers do not run."""

import multiprocessing
import os
import sys

from train import main


def rank(number: int, ranks: int) -> None:
    os.environ.update(RANK=str(number), WORLD_SIZE=str(ranks))
    main()


if __name__ == "__main__":
    ranks = int(sys.argv.pop(1))
    processes = [multiprocessing.get_context("fork").Process(target=rank, args=(each, ranks)) for each in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in processes))
