"""Base of ladder, mixture and branches files: a target profile, and runs for it within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, ValidationError

from profiles import yaml_text
from profiles.errors import ProfileError
from profiles.sections.base import NAME, Count, Section
from profiles.validation_errors import profile_error


class Experiment(Section):
    """The target, and the settings of all runs."""

    name: str = Field(
        pattern=f"^{NAME}$", description="name of the experiment; names of its runs begin with it"
    )
    description: str = Field("", description="one-line description")
    target: str = Field(min_length=1, description="target profile: a name, or a path relative to this file")
    overrides: list[str] = Field([], description="KEY=VALUE for the target and every run")
    devices: Count | None = Field(
        None, description="devices that runs may use at the same time; null: as many as the largest run uses"
    )
    maximum_flops: Annotated[float, Field(gt=0)] | None = Field(
        None, description="budget for all runs in training FLOPs; more is rejected"
    )
    maximum_price: Annotated[float, Field(gt=0)] | None = Field(
        None, description="budget for all runs in the currency of cluster.node_price; more is rejected"
    )

    shipped: ClassVar[Path | None] = None  # folder of shipped files: .yml, because profiles are .yaml

    @classmethod
    def load(cls, file: str | Path) -> Self:
        """Read a file, or a shipped one by name; a path as target becomes relative to the working folder.

        Raises:
            ProfileError: there is no such file, an unknown key, or a value of the wrong type.
        """
        kind = cls.__name__.lower()
        path = Path(file).expanduser()
        if "/" not in str(file) and path.suffix not in (".yaml", ".yml"):
            found = sorted(cls.shipped.glob("*.yml")) if cls.shipped else []
            known = {each.stem: each for each in found}
            if str(file) not in known:
                reason = f"there is no such {kind}; a file ends in .yaml"
                raise ProfileError(kind, str(file), reason, list(known))
            path = known[str(file)]
        try:
            values = yaml_text.parse(path.read_text())
        except FileNotFoundError:
            raise ProfileError(kind, str(file), "there is no such file") from None
        except (ValueError, OSError) as error:
            raise ProfileError(kind, str(file), str(error)) from error
        if not isinstance(values, dict):
            raise ProfileError(kind, str(file), "is not a mapping of keys")
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


class SmallRuns(Experiment):
    """Runs of the target's family that are smaller or shorter."""

    batch_exponent: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="batch size ∝ training tokens to this power, and learning rate ∝ √batch (arXiv 2410.21676, 2205.10287); "
        "0: the target's batch for every run",
    )
