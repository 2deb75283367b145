"""What becomes of a group on its way to a trainer."""

import enum


class GroupState(enum.StrEnum):
    """What a consumer did with a group. One that is done or skipped is not given again."""

    GIVEN = "given"
    DONE = "done"
    SKIPPED = "skipped"


class Late(enum.StrEnum):
    """What to do with a group of which attempts are missing when its time is over."""

    GIVE = "give"  # without them
    SKIP = "skip"
