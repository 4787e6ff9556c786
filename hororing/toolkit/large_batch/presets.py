"""Hyper-parameters that others have trained ResNet-50 on ImageNet with, by batch, as data.

MLPERF holds the reference convergence points of MLPerf training's ResNet-50 (mlcommons/logging,
rcps_resnet.json): all LARS with trust coefficient 0.001, eps 0, momentum in its scaled form,
warm-up from 0 and polynomial decay of power 2. They are for that model and data set, and only a
starting point for others.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from hororing.toolkit.large_batch.schedules import WarmupPolynomial, steps_in

IMAGENET_SAMPLES: Final = 1_281_167


class Preset(NamedTuple):
    """One point."""

    batch: int  # effective
    epochs: float  # mean of the runs until the target was reached
    peak: float  # learning rate
    warmup_epochs: float
    weight_decay: float
    momentum: float
    batch_norm_samples: int  # over which batch-norm took its statistics
    trust_coefficient: float = 0.001
    eps: float = 0.0
    power: float = 2.0
    end: float = 0.0

    def lars(self) -> dict[str, float]:
        """Return the arguments of `LARS`, in torch's words; ``lr`` is the peak."""
        return {
            "lr": self.peak,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "trust_coefficient": self.trust_coefficient,
            "eps": self.eps,
        }

    def schedule(
        self, samples: int = IMAGENET_SAMPLES, *, epochs: float | None = None
    ) -> WarmupPolynomial:
        """Return the learning rates; `epochs` is the end of the decay.

        None: the mean number of epochs, rounded up.
        """
        total = -(-self.epochs // 1) if epochs is None else epochs
        return WarmupPolynomial(
            peak=self.peak,
            total_steps=steps_in(total, samples, self.batch),
            warmup_steps=steps_in(self.warmup_epochs, samples, self.batch),
            end=self.end,
            power=self.power,
        )


MLPERF: Final[dict[int, Preset]] = {
    preset.batch: preset
    for preset in (
        Preset(1632, 35.0, 7.4, 2, 5e-5, 0.9, 204),
        Preset(3264, 35.2, 10.5, 2, 5e-5, 0.9, 204),
        Preset(4096, 40.0, 10.0, 5, 2e-4, 0.9, 64),
        Preset(8192, 42.0, 17.0, 5, 2e-4, 0.9, 64),
        Preset(13056, 45.4, 12.8, 9, 2.5e-5, 0.9, 204),
        Preset(32768, 56.0, 21.2, 16, 2.5e-5, 0.94, 128),
        Preset(49152, 68.0, 19.4, 24, 1e-4, 0.952, 256),
        Preset(58880, 79.9, 23.2, 29, 1e-4, 0.952, 230),
        Preset(65536, 84.5, 24.7, 31, 1e-4, 0.952, 128),
    )
}

# Graphcore's for a POD16 (graphcore/examples, vision/cnns/tensorflow2/configs.yml): 36 epochs of
# decay after 2 of warm-up; label smoothing 0.1 and batch-norm over 2 replicas go with it. (Its
# weight decay is a separate L2 term there.)
GRAPHCORE_POD16: Final = Preset(
    3520, 38, 0.003045455 * 3520, 2, 5e-5, 0.9, 40, end=0.003045455 * 3520 * 9.33e-6
)


def nearest(batch: int) -> Preset:
    """Return the MLPerf point whose batch is nearest to `batch`, by ratio.

    >>> preset = nearest(4096)
    >>> rate = preset.schedule(1_281_167)
    """
    if batch < 1:
        raise ValueError(f"batch={batch} must be positive")
    return min(MLPERF.values(), key=lambda each: max(each.batch / batch, batch / each.batch))
