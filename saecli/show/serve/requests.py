"""What pages may ask for, as JSON; pydantic checks it strictly."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le, MaxLen, MinLen

LETTERS = 20_000  # of a text, which is read in one turn: seconds of a small model on two cores
Name = Annotated[str, MaxLen(512)]
Text = Annotated[str, MinLen(1), MaxLen(LETTERS)]
Latent = Annotated[int, Ge(0), Le(2**31 - 1)]


@dataclass(frozen=True)
class Message:
    role: Annotated[str, MaxLen(32)]
    content: Annotated[str, MaxLen(LETTERS)]


@dataclass(frozen=True)
class ToRead:
    """A text, or the messages of a chat, and what is asked of it, see `saecli.read`."""

    run: Name
    text: Text | Annotated[list[Message], MinLen(1), MaxLen(100)]
    compare: Text | None = None
    why: str | Annotated[int, Ge(0), Le(2**31 - 1)] | None = None  # a token's text, or its id
    against: str | None = None
    steps: Annotated[int, Ge(1), Le(50)] = 1
    top: Annotated[int, Ge(1), Le(50)] = 10


@dataclass(frozen=True)
class Edit:
    latent: Latent
    method: Literal["add", "clamp", "ablate"]
    scale: Annotated[float, Ge(-1e6), Le(1e6)] = 0.0


@dataclass(frozen=True)
class ToContinue:
    """A text to continue, plain and with codes changed; see `saecli.steer`."""

    run: Name
    text: Text | Annotated[list[Message], MinLen(1), MaxLen(100)]
    edits: Annotated[list[Edit], MaxLen(64)] = field(default_factory=list)
    most: Annotated[int, Ge(1), Le(512)] = 40  # new tokens
    temperature: Annotated[float, Ge(0), Le(10)] = 0.0
    seed: Annotated[int, Ge(0), Le(2**53)] = 0


@dataclass(frozen=True)
class ToLabel:
    run: Name
    latent: Latent
    label: Annotated[str, MaxLen(500)] | None  # None removes the one by hand
