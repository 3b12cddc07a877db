"""The callbacks, and the progress bars, of the real Lightning, Transformers and Keras, on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpushare.job.bars import Bars
from jupyter_gpushare.job.progress import SOCKET_VARIABLE

TRAINERS = Path(sys.prefix) / "trainers"
REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not TRAINERS.is_dir(), reason="no trainers: `make test-long` installs them"),
]

LIGHTNING = """
import torch, NAME
from NAME.callbacks import TQDMProgressBar
from jupyter_gpushare.job import LightningProgress

class Model(NAME.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, at):
        return self.layer(batch[0]).mean()
    def validation_step(self, batch, at):
        pass
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(40, 4)), batch_size=2)
NAME.Trainer(
    accelerator="cpu", logger=False, enable_checkpointing=False, LIMIT,
    callbacks=[LightningProgress(), TQDMProgressBar()],
).fit(Model(), data, data)
"""
TRANSFORMERS = """
import torch
from transformers import Trainer, TrainingArguments
from jupyter_gpushare.job import TransformersProgress

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x=None, labels=None):
        found = self.layer(x)
        return {"loss": ((found - labels) ** 2).mean(), "logits": found}

data = [{"x": torch.zeros(4), "labels": torch.zeros(1)} for _ in range(40)]
arguments = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, eval_strategy="epoch", save_strategy="no",
    report_to=[], use_cpu=True,
)
Trainer(Model(), arguments, train_dataset=data, eval_dataset=data, callbacks=[TransformersProgress()]).train()
"""
KERAS = """
import keras, numpy
from jupyter_gpushare.job import KerasProgress

model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(
    numpy.zeros((80, 4)), numpy.zeros((80, 1)), batch_size=4, epochs=3, validation_split=0.25,
    verbose=VERBOSE, callbacks=[KerasProgress()],
)
"""
NESTED = """
import time
from tqdm import tqdm, trange
from jupyter_gpushare import progress

for epoch in trange(5):
    for step in INNER:
        time.sleep(0.02)
    progress(epoch + 1, 5)
"""


def lightning(name: str, limit: str) -> str:
    return LIGHTNING.replace("NAME", name).replace("LIMIT", limit)


#: A program, the total of its reports, and what its bars show at the end.
PROGRAMS = {
    "lightning": (lightning("lightning.pytorch", "max_epochs=3"), 3, None),
    "lightning, steps": (lightning("lightning.pytorch", "max_steps=50"), 50, None),
    "pytorch_lightning": (lightning("pytorch_lightning", "max_epochs=3"), 3, None),
    "transformers": (TRANSFORMERS, 30, (30, 30)),
    "keras": (KERAS.replace("VERBOSE", "1"), 3, (3, 3)),
    "keras, a line each epoch": (KERAS.replace("VERBOSE", "2"), 3, (3, 3)),
    "tqdm": (NESTED.replace("INNER", "trange(7)"), 5, (5, 5)),
    "tqdm, cleared": (NESTED.replace("INNER", "trange(7, leave=False)"), 5, (5, 5)),
    "tqdm, in one line": (NESTED.replace("INNER", "tqdm(range(7), position=0, leave=True)"), 5, (5, 5)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trainer_reports_its_progress_and_its_bars_are_not_misread(name: str, tmp_path: Path) -> None:
    code, total, bars_say = PROGRAMS[name]
    env = {
        **os.environ,
        "PYTHONPATH": f"{TRAINERS}:{REPOSITORY}",
        "KERAS_BACKEND": "torch",
        "CUDA_VISIBLE_DEVICES": "",
        SOCKET_VARIABLE: str(tmp_path / "s"),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "s"))
        end.setblocking(False)
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=600,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout[-3000:].decode()
        told = []
        while True:
            try:
                told.append(json.loads(end.recv(1000)))
            except BlockingIOError:
                break
    assert {each["total"] for each in told} == {total}
    done = [each["done"] for each in told]
    assert done == sorted(done)
    assert done[-1] == total
    assert len(set(done)) >= 3
    bars = Bars()
    bars.feed(ran.stdout, 0.0)
    assert bars.progress == bars_say
