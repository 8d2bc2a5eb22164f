"""Child process: trains, and kills itself with SIGKILL in the middle of its second checkpoint."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from flow_factory.checkpoints import atomic
from tests.trainers.support import make_trainer


def main() -> None:
    pipeline, folder, changes = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    trainer = make_trainer(pipeline, folder, changes)

    def kill(label: str) -> None:
        half = trainer.epoch == 4 and "meta.json" in label and (folder / "save/run/checkpoints").exists()
        if half and (folder / "save/run/checkpoints/checkpoint-000002").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    atomic._after_write = kill
    trainer.start()


if __name__ == "__main__":
    main()
