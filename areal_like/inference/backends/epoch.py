"""What we know of one server's version while requests and updates go on side by side.

The rule kept here: a request posted after an update never shares prefix KV with one posted before it. Requests carry a
salt of the prefix cache: the version's label; while an update is under way, when nobody can tell whether a request
will meet the old weights or the new ones, a salt of their own, so that nothing of theirs is ever reused.
"""

from __future__ import annotations

from areal_like.inference.backends.labels import version_label


class ServerEpoch:
    """The (incarnation, version) that a server has acknowledged, and whether an update is under way."""

    def __init__(self) -> None:
        self.incarnation = -1
        self.version = -1
        self.commits = 0
        self.updating = False
        #: of an update: what is written now may be of the new weights
        self.loading = False
        #: where answers tell no versions: requests that have no answer yet -> (commits, version) as they were posted
        self.posted: dict[str, tuple[int, int]] = {}
        #: False where a seeded request would end the server
        self.seeds = True

    @property
    def known(self) -> tuple[int, int]:
        return self.incarnation, self.version

    def salt(self, rid: str) -> str:
        """For a request that is posted now."""
        return f"{rid}.alone" if self.updating else version_label(self.incarnation, self.version)

    def begin(self) -> None:
        """An update is under way from here on."""
        self.updating, self.loading = True, False
        self.commits += 1

    def load(self) -> None:
        """It may write under the new weights from here on. While it is paused, it writes nothing."""
        self.loading = True

    def end(self, incarnation: int, version: int) -> None:
        """The server runs again, under this version."""
        self.incarnation, self.version = incarnation, version
        self.updating = self.loading = False

    def withdraw(self) -> None:
        """The update was given up with the old weights untouched; old prefix KV is still good."""
        if self.updating and not self.loading:
            self.commits -= 1
        self.updating = self.loading = False

    def unchanged_since(self, commits: int, *, cut: bool) -> bool:
        """Whether an answer that is read now was written under the weights of when ``commits`` were counted.

        ``cut``: it was ended by an update, thus by the first that it met; another may not have passed it unseen.
        """
        passed = self.commits - commits
        return passed == 0 or (passed == 1 and (cut or (self.updating and not self.loading)))
