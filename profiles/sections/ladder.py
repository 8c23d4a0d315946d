"""Ladder file: the small runs of a target profile whose losses forecast the target's; `load` reads and validates one.

Shipped ladders are in profiles/ladders/, as .yml, for profiles end in .yaml.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from profiles import yaml_text
from profiles.errors import ProfileError
from profiles.schema import NAME
from profiles.sections.base import Count, Section, Size
from profiles.validation_errors import profile_error

SHIPPED = Path(__file__).parents[1] / "ladders"


class RungSize(Section):
    """Runs of one size: a width and a depth of the target's family, each trained for several lengths."""

    hidden_size: Size = Field(description="width; heads keep their size, so it is a multiple of it")
    num_hidden_layers: Count | None = Field(None, description="depth; null: the target's")
    tokens_per_parameter: list[Annotated[float, Field(gt=0)]] = Field(
        min_length=1,
        description="lengths, one run each: training tokens over N, the multiply-adds per token; 20 is Chinchilla's",
    )


class Ladder(Section):
    """A ladder file."""

    name: str = Field(pattern=f"^{NAME}$", description="name of the ladder; names of its runs begin with it")
    description: str = Field("", description="one-line description")
    target: str = Field(
        min_length=1, description="profile to forecast: a name, or a path relative to this file"
    )
    overrides: list[str] = Field([], description="KEY=VALUE, of the target and of every rung")
    rung_overrides: list[str] = Field(
        [], description="KEY=VALUE of the rungs alone, such as fewer devices; no mathematics"
    )
    rungs: list[RungSize] = Field(min_length=1, description="sizes of the rungs, each with its lengths")
    batch_exponent: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="batch size ∝ training tokens to this power, and learning rate ∝ √batch (arXiv 2410.21676, 2205.10287); "
        "0: the target's batch for every rung",
    )
    devices: Count | None = Field(
        None,
        description="devices that rungs may use at the same time; null: as many as the largest rung uses",
    )
    maximum_flops: Annotated[float, Field(gt=0)] | None = Field(
        None, description="budget of all rungs in training FLOPs; a ladder above it is rejected"
    )
    maximum_price: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="budget of all rungs in the currency of cluster.node_price; a ladder above it is rejected",
    )


def load(file: str | Path) -> Ladder:
    """Read a ladder file, or a shipped ladder by its name; a target that is a path becomes relative to the working folder.

    Raises:
        ProfileError: there is no such file, an unknown key, or a value of the wrong type.
    """
    path = Path(file).expanduser()
    if "/" not in str(file) and path.suffix not in (".yaml", ".yml"):
        path = SHIPPED / f"{file}.yml"
        if not path.exists():
            names = sorted(each.stem for each in SHIPPED.glob("*.yml"))
            raise ProfileError("ladder", str(file), "there is no such ladder; a file ends in .yaml", names)
    try:
        values = yaml_text.parse(path.read_text())
    except FileNotFoundError:
        raise ProfileError("ladder", str(file), "there is no such file") from None
    except (ValueError, OSError) as error:
        raise ProfileError("ladder", str(file), str(error)) from error
    if not isinstance(values, dict):
        raise ProfileError("ladder", str(file), "is not a mapping of keys")
    values.setdefault("name", f"{path.stem}-ladder" if path.parent == SHIPPED else path.stem)
    try:
        ladder = Ladder.model_validate(values)
    except ValidationError as error:
        raise profile_error(error, values, Ladder) from None
    if "/" in ladder.target or ladder.target.endswith((".yaml", ".yml")):
        target = path.parent / Path(ladder.target).expanduser()
        ladder = ladder.model_copy(update={"target": str(target if "/" in str(target) else f"./{target}")})
    return ladder
