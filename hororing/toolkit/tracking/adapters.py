"""Other trackers that get the data of a run's record, if they are installed.

They have their own defaults for storage and account. On rank 0 only.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class Tracker(ABC):
    """Another tracker of runs.

    Parameters
    ----------
    required : bool, optional
        Raise ModuleNotFoundError if it is not installed, instead of leaving it out.
    """

    package: str  # what is imported
    distribution: str  # what is installed

    def __init__(self, *, required: bool = False) -> None:
        self.required = required

    def begin(self, run: Mapping[str, Any]) -> bool:
        """Begin with a run's first line; False: the tracker is not installed."""
        try:
            module = importlib.import_module(self.package)
        except ModuleNotFoundError as missing:
            if missing.name is None or self.package.split(".")[0] != missing.name.split(".")[0]:
                raise  # it is installed, but one of its dependencies is not
            if self.required:
                raise ModuleNotFoundError(self.why_not(), name=missing.name) from None
            return False
        self.start(module, run)
        return True

    def why_not(self) -> str:
        """Return the remedy if it is missing."""
        name = type(self).__name__
        return f"tracking without {name}: it is not installed; pip install {self.distribution}"

    @abstractmethod
    def start(self, module: ModuleType, run: Mapping[str, Any]) -> None:
        """Begin a run with the imported package."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics."""

    @abstractmethod
    def end(self, status: str) -> None:
        """End the run: "completed" or "failed"."""


class TensorBoard(Tracker):
    """Event files in `folder`/<name of the run>, written with the package tensorboard alone."""

    package = "tensorboard.summary"
    distribution = "tensorboard"

    def __init__(self, folder: str, *, required: bool = False) -> None:
        super().__init__(required=required)
        self.folder = folder
        self._writer: Any = None

    def start(self, module: ModuleType, run: Mapping[str, Any]) -> None:
        """Open a file."""
        self._writer = module.Writer(module.DirectoryOutput(f"{self.folder}/{run['name']}"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add scalars, and flush."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, status: str) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases; `options` are those of ``wandb.init``, such as project."""

    package = "wandb"
    distribution = "wandb"

    def __init__(self, *, required: bool = False, **options: Any) -> None:
        super().__init__(required=required)
        self.options = options
        self._run: Any = None

    def start(self, module: ModuleType, run: Mapping[str, Any]) -> None:
        """Begin a run of the same name."""
        config = {**run["config"], "seed": run["seed"]}
        self._run = module.init(**{"name": run["name"], "config": config, **self.options})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add values at a step."""
        self._run.log(dict(values), step=step)

    def end(self, status: str) -> None:
        """Finish, as successful or not."""
        self._run.finish(exit_code=0 if status == "completed" else 1)


class MLflow(Tracker):
    """A run of MLflow; `options` are those of ``mlflow.start_run``, such as experiment_id."""

    package = "mlflow"
    distribution = "mlflow"

    def __init__(self, *, required: bool = False, **options: Any) -> None:
        super().__init__(required=required)
        self.options = options
        self._module: Any = None

    def start(self, module: ModuleType, run: Mapping[str, Any]) -> None:
        """Begin a run of the same name, with the hyper-parameters by dotted names."""
        from hororing.toolkit.tracking.comparison import (
            flat,  # imported here: it needs nothing of this module
        )

        self._module = module
        self._module.start_run(**{"run_name": run["name"], **self.options})
        seed = {} if run["seed"] is None else {"seed": run["seed"]}
        self._module.log_params({**flat(run["config"]), **seed})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics at a step."""
        self._module.log_metrics(dict(values), step=step)

    def end(self, status: str) -> None:
        """End, as finished or failed."""
        self._module.end_run(status="FINISHED" if status == "completed" else "FAILED")
