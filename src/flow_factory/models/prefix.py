"""Steps that the members of a group have in common, evaluated once.

Where all members of a group start from the same noise, they are equal until the first stochastic step: those steps are
evaluated for one row per prompt, whose state is then branched to all members.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from flow_factory.samples import LatentState

# Takes row numbers; returns their state after the common steps, and the states kept on the way by grid index.
Walk = Callable[[list[int]], tuple[LatentState, dict[int, LatentState]]]


class SharedPrefix:
    """The common steps of one cycle's groups; a group that comes back in a later batch is not evaluated again.

    Attributes:
        evaluated: Rows times steps that were evaluated here.
        saved: Rows times steps that sharing saved.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[LatentState, dict[int, LatentState]]] = {}
        self.evaluated = 0
        self.saved = 0

    def walk(self, keys: Sequence[Hashable], steps: int, evaluate: Walk) -> tuple[LatentState, dict[int, LatentState]]:
        """The state of every row after the common steps, and the states kept on the way.

        Args:
            keys: Per row, what its common steps are a function of: rows with equal keys share them.
            steps: How many steps are common.
            evaluate: Walks them for some of the rows.
        """
        new: dict[Hashable, int] = {}
        for row, key in enumerate(keys):
            if key not in self._known and key not in new:
                new[key] = row
        if new:
            state, kept = evaluate(list(new.values()))
            for number, key in enumerate(new):
                self._known[key] = (state.row(number), {index: s.row(number) for index, s in kept.items()})
        self.evaluated += steps * len(new)
        self.saved += steps * (len(keys) - len(new))
        rows = [self._known[key] for key in keys]
        return (
            LatentState.stack([state for state, _ in rows]),
            {index: LatentState.stack([kept[index] for _, kept in rows]) for index in rows[0][1]},
        )
