"""Users and groups of the host."""

import grp
import os
import pwd


def user_label(uid: int) -> str:
    """A user with name and number."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


def is_private_group(gid: int) -> bool:
    """Whether a group is the user's own; many distributions create a group for each user."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}
