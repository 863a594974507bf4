"""People who decide about champions: a user of this machine with its groups, or one whom a signing-in proxy names."""

import grp
import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass

from stages.core.errors import ApprovalError


@dataclass(frozen=True)
class Person:
    """Person with the groups that vouch for a decision. is_local: known to this machine, not by a proxy."""

    name: str
    groups: frozenset[str]
    is_local: bool = True

    def check_membership(self, groups: Sequence[str], what: str) -> None:
        """Raise ApprovalError unless the person is a member of one of the groups."""
        if self.groups.intersection(groups):
            return
        wanted = " or ".join(groups)
        unknown = [group for group in groups if self.is_local and not _exists(group)]
        known = f"; this machine has no group {' and no group '.join(unknown)}" if unknown else ""
        raise ApprovalError(f"{what}: {self.name} may not decide, expected a member of {wanted}{known}")


def user_of_this_process() -> Person:
    """Return the user who runs this process, with its groups of the operating system.

    Raises ApprovalError for a user whom the system does not know.
    """
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:
        raise ApprovalError(
            f"deciding about a champion: the user {os.getuid()} has no name on this machine; expected one who has"
        ) from None
    # Those of the system's database, not of the process: a container may give a process any.
    numbers = os.getgrouplist(user.pw_name, user.pw_gid)
    return Person(user.pw_name, frozenset(name for number in numbers if (name := _name_of(number))))


def _name_of(group: int) -> str | None:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return None


def _exists(group: str) -> bool:
    try:
        grp.getgrnam(group)
    except KeyError:
        return False
    return True
