"""The callbacks of ``model.fit`` for an elastic state, for Keras 3 and for tf_keras.

Mixins for a callback of either, like those of hororing._adapters.fit_callbacks.
"""

from __future__ import annotations

from typing import Any


class CommitState:
    """Commits the state after every `batches_per_commit` batches, and after every epoch.

    If each step is a transaction, it calls `check_host_updates` after the other batches. Then a
    failure costs only the batch in flight, however rarely the state is committed.

    It acts when the next batch, the validation or the next epoch begins, and at the end. By then
    the other callbacks have recorded their values, wherever they are in the list.

    Parameters
    ----------
    state : State
        An elastic state of the model.
    batches_per_commit : int, optional
        A commit copies the model, which takes time; a failure costs the batches since the last
        one. Every commit checks for changes of hosts.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = 0  # since the last commit
        self._ended = False  # a batch has ended since the last check
        self._due = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin to count."""
        self._batches, self._ended, self._due = 0, False, False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count."""
        self._batches += 1
        self._ended = True
        self._due = self._batches >= self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note that a commit is due."""
        self._due = True

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit, if due."""
        ended, self._ended = self._ended, False
        if self._due:
            self._batches, self._due = 0, False
            self.state.commit()
        elif ended and self.state.keeps_steps:
            self.state.check_host_updates()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Commit, if due."""
        self.on_train_batch_begin(0)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit, if due."""
        self.on_train_batch_begin(0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Commit, if due."""
        self.on_train_batch_begin(0)


class UpdateBatchState:
    """Counts the batches of an epoch in ``state.batch``, and ends a resumed epoch earlier.

    An epoch that was interrupted after `state.batch` batches is shorter by that many when it is
    resumed, if Keras knows its length. The data set determines which samples it has.

    Parameters
    ----------
    state : State
        An elastic state with a `batch`, initially 0.
    """

    model: Any  # Keras sets these two
    params: dict[str, Any] | None

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before = 0  # batches of this epoch before it was resumed
        self._ended = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note where the epoch is resumed."""
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count, and end an epoch that has had all its batches."""
        self.state.batch = self._before + batch + 1
        steps = (self.params or {}).get("steps")
        if self._before and steps and self.state.batch >= steps:
            self._ended = not self.model.stop_training
            self.model.stop_training = True  # Keras ends the epoch, and checks it again afterwards

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Restart the count, and let training continue after an ended epoch."""
        self.state.batch = 0
        if self._ended:
            self._ended = self.model.stop_training = False


class UpdateEpochState:
    """Counts epochs in ``state.epoch``. A resumed training begins there, in either of two ways:

    >>> model.fit(x, y, initial_epoch=state.epoch, epochs=20)
    >>> model.fit(x, y, epochs=20 - state.epoch)  # Keras counts these from 0

    Parameters
    ----------
    state : State
        An elastic state with an `epoch`, initially 0.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before: int | None = None  # epochs that Keras does not count

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin to count."""
        self._before = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the epoch."""
        if self._before is None:
            self._before = 0 if epoch else self.state.epoch
        self.state.epoch = self._before + epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the next epoch."""
        self.state.epoch += 1
