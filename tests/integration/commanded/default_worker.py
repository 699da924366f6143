"""As a worker of Ray Train's: it trains in a thread, and goes on until it is killed."""

import os
import signal
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from train import main  # pyright: ignore[reportMissingImports]

    training = threading.Thread(target=main)
    training.start()
    training.join()
    os.kill(os.getpid(), signal.SIGKILL)
