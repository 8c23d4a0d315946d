"""Files of experiments, several runs for a target: ladders, mixtures, replay shares and branches.

Shipped files are in `shipped/ladders/` and `shipped/branches/`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from profiles.errors import ProfileError, closest_files
from profiles.files import folders, yaml_text
from profiles.sections.base import NAME, Count, Fraction, Rate, Section, Size
from profiles.sections.data import WORTHWHILE_PASSES
from profiles.validation_errors import profile_error

SHIPPED = Path(__file__).parent / "shipped"
TRUNK = "trunk"  # name of the trunk of branches among the members of an average


class Experiment(Section):
    """The target, and the settings of all runs."""

    name: str = Field(pattern=f"^{NAME}$")
    """name of the experiment; names of its runs begin with it"""
    description: str = ""
    """one-line description"""
    target: str = Field(min_length=1)
    """target profile: a name, or a path relative to this file"""
    overrides: list[str] = Field(default=[])
    """KEY=VALUE for the target and every run"""
    devices: Count | None = None
    """devices that runs may use at the same time; null: as many as the largest run uses"""
    maximum_flops: Annotated[float, Field(gt=0)] | None = None
    """budget for all runs in training FLOPs; more is rejected"""
    maximum_price: Annotated[float, Field(gt=0)] | None = None
    """budget for all runs in the currency of cluster.node_price; more is rejected"""

    shipped: ClassVar[Path | None] = None  # folder of shipped files: .yml, because profiles are .yaml


class SmallRuns(Experiment):
    """Runs of the target's family that are smaller or shorter."""

    batch_exponent: float = Field(default=0.0, ge=0, lt=1)
    """batch size ∝ training tokens to this power, and learning rate ∝ √batch (arXiv 2410.21676, 2205.10287); 0: the target's
    batch for every run"""


class RungSize(Section):
    """Runs of one size, a width and a depth in the target's family, trained for several lengths."""

    hidden_size: Size
    """width; a multiple of the target's head size, which rungs keep"""
    num_hidden_layers: Count | None = None
    """depth; null: the target's"""
    tokens_per_parameter: list[Annotated[float, Field(gt=0)]] = Field(min_length=1)
    """lengths, one run each: training tokens / N, the multiply-adds per token; 20 is Chinchilla's"""


class Ladder(SmallRuns):
    """A ladder file."""

    page: ClassVar[str] = "docs/training/ladder.md"
    shipped: ClassVar[Path | None] = SHIPPED / "ladders"

    rung_overrides: list[str] = Field(default=[])
    """KEY=VALUE for the rungs only, such as fewer devices; not the mathematics"""
    rungs: list[RungSize] = Field(min_length=1)
    """sizes of the rungs, each with its lengths"""


class ProxySize(Section):
    """The size and length of all proxies, in the target's family."""

    hidden_size: Size
    """width; a multiple of the target's head size, which proxies keep"""
    num_hidden_layers: Count | None = None
    """depth; null: the target's"""
    tokens_per_parameter: float = Field(gt=0)
    """length: training tokens / N, the multiply-adds per token"""


class ProxyGroup(Section):
    """Proxies with the same sources: one with the natural mixture, the others with sampled weights."""

    sources: list[str] | None = Field(default=None, min_length=2)
    """names of the training sources; null: all. A group made before a source was added lists the earlier ones"""
    count: Count | None = None
    """number of proxies; null: 4 for each source that no earlier group has"""


class Mixture(SmallRuns):
    """A mixture file."""

    page: ClassVar[str] = "docs/training/mixtures.md"

    proxy: ProxySize
    """size and length of each proxy"""
    proxy_overrides: list[str] = Field(default=[])
    """KEY=VALUE for the proxies only, such as fewer devices; not the mathematics"""
    proxies: list[ProxyGroup] = Field(default=[ProxyGroup()], min_length=1)
    """groups of proxies; the last one has all sources"""
    objective: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})
    """weights of the sources' held-out losses in the minimised mean; {}: the natural mixture's"""
    minimum_weight: float | None = Field(default=None, gt=0, lt=1)
    """minimum weight of a source in sampled and proposed mixtures; null: 0.1 / number of sources"""
    maximum_passes: Annotated[float, Field(gt=0)] | None = float(WORTHWHILE_PASSES)
    """maximum passes of the target over a source (arXiv 2305.16264); null: no limit"""


class Share(SmallRuns):
    """A share file."""

    page: ClassVar[str] = "docs/training/continual.md"

    series: Annotated[str, Field(pattern=f"^{NAME}$")] | None = None
    """name of the series, that of its first run; null: the target's"""
    round_overrides: list[str] = Field(default=["train.steps=null", "train.epochs=1"])
    """KEY=VALUE for the rounds only, as in their deployment"""
    proxy: ProxySize
    """size of each proxy, and length of the one that stands for the promoted model; rounds of it are shorter in proportion"""
    proxy_overrides: list[str] = Field(default=[])
    """KEY=VALUE for the proxies only, such as fewer devices; not the mathematics"""
    shares: list[Fraction] = Field(default=[0.0, 0.02, 0.05, 0.1, 0.2, 0.4], min_length=4)
    """shares of replayed tokens, one proxy each"""
    objective: dict[Literal["old", "new"], Rate] = Field(default={"old": 1.0, "new": 1.0})
    """weights of the old and the new held-out loss in the minimised mean"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(later <= share for share, later in pairwise(self.shares)):
            reason = "is not in increasing order"
            raise ProfileError("shares", self.shares, reason, [sorted(set(self.shares))])
        if not any(self.objective.values()):
            raise ProfileError("objective", None, "gives both losses weight 0")
        return self


class Branch(Section):
    """A run that starts from a checkpoint of the trunk and decays the learning rate to zero."""

    step: Count
    """step of the trunk's checkpoint; a multiple of `every`"""
    decay: Count | None = None
    """decay steps; null: the file's `decay` as a share of `step`"""
    name: str | None = Field(default=None, pattern=f"^{NAME}$")
    """suffix of the run's name; null: derived from its steps"""
    overrides: list[str] = Field(default=[])
    """KEY=VALUE for this branch only, such as another mixture"""


class Average(Section):
    """The mean of checkpoints' weights, evaluated and exported."""

    name: str = Field(pattern=f"^{NAME}$")
    """name of the average"""
    of: list[str] = Field(min_length=1)
    """runs to average checkpoints of: trunk, trunk@STEP, or names of branches"""
    last: Count = 1
    """number of latest checkpoints of each run, up to STEP"""


class Branches(Experiment):
    """A branches file."""

    page: ClassVar[str] = "docs/training/branches.md"
    shipped: ClassVar[Path | None] = SHIPPED / "branches"

    every: Count
    """steps between the trunk's checkpoints, all of which are kept"""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2
    """default decay of branches, as a share of the steps before them"""
    branches: list[Branch] = Field(min_length=1)
    """the branches"""
    averages: list[Average] = Field(default=[])
    """averages of checkpoints"""


Kind = TypeVar("Kind", bound=Experiment)


def load_experiment(cls: type[Kind], file: str | Path) -> Kind:
    """Read a file, or a shipped one by name; a path as target becomes relative to the working folder.

    Raises:
        ProfileError: there is no such file, an unknown key, or a value of the wrong type.
    """
    kind = cls.__name__.lower()
    path = Path(file).expanduser()
    if "/" not in str(file) and path.suffix not in (".yaml", ".yml"):
        found = folders.matches(cls.shipped, "*.yml") if cls.shipped else []
        known = {each.stem: each for each in found}
        if str(file) not in known:
            reason = "is neither a shipped file nor a path that ends in .yaml"
            raise ProfileError(kind, str(file), reason, list(known))
        path = known[str(file)]
    try:
        values = yaml_text.read(path)
    except FileNotFoundError:
        nearest = closest_files(str(file), "*.y*ml")
        raise ProfileError(kind, str(file), "there is no such file", nearest) from None
    except ValueError as error:
        raise ProfileError(kind, str(file), str(error)) from error
    if not isinstance(values, dict):
        raise ProfileError(kind, str(file), "is not a mapping of keys")
    if values.keys() & {"extends", "model"}:
        raise ProfileError(
            kind, str(file), f"is a profile, which a file as in {cls.page} names as its target"
        )
    values.setdefault("name", f"{path.stem}-{kind}" if path.parent == cls.shipped else path.stem)
    try:
        experiment = cls.model_validate(values)
    except ValidationError as error:
        raise profile_error(error, values, cls) from None
    target = experiment.target
    if "/" in target or target.endswith((".yaml", ".yml")):
        target = str(path.parent / Path(target).expanduser())
        target = target if "/" in target else f"./{target}"
    return experiment.model_copy(update={"target": target})
