# SPDX-License-Identifier: AGPL-3.0-only
"""The table behaviour × backend: for people, as JSON, and as Markdown."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import msgspec

WORDS = {
    "passed": "yes",
    "refused": "refuses",
    "failed": "FAILED",
    "skipped": "not run",
}
"""``refuses``: the backend does not claim it, and says so with the typed error."""


class Cell(msgspec.Struct, kw_only=True, frozen=True):
    """What one test saw. Plain data, since tests may run in other processes."""

    section: str
    behaviour: str
    column: str
    outcome: str
    behind: str | None = None
    """A word on what is behind the backend."""
    absent: str | None = None
    """Why the backend is not there."""


@dataclass
class Table:
    """What was seen. Behaviours keep the order in which they were first reported."""

    columns: dict[str, str] = field(default_factory=dict)
    """Name of a backend, and a word on what was behind it."""
    absent: dict[str, str] = field(default_factory=dict)
    """Backends that were asked for and not there, with the reason."""
    sections: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    """Section → behaviour → backend → outcome."""

    def put(self, section: str, behaviour: str, column: str, outcome: str) -> None:
        """One outcome. A failure is never overwritten: teardown may fail after a pass."""
        cells = self.sections.setdefault(section, {}).setdefault(behaviour, {})
        if cells.get(column) != "failed":
            cells[column] = outcome

    def counts(self) -> dict[str, dict[str, int]]:
        """Backend → outcome → how many."""
        found: dict[str, dict[str, int]] = {column: {} for column in self.columns}
        for behaviours in self.sections.values():
            for cells in behaviours.values():
                for column, outcome in cells.items():
                    counted = found.setdefault(column, {})
                    counted[outcome] = counted.get(outcome, 0) + 1
        return found

    def as_json(self) -> str:
        """Everything, for programs."""
        return json.dumps(
            {
                "backends": self.columns,
                "absent": self.absent,
                "counts": self.counts(),
                "behaviours": self.sections,
            },
            indent=2,
            ensure_ascii=False,
        )

    def as_markdown(self) -> str:
        """For documents. Backends that were absent have no column."""
        names = [column for column in self.columns if column not in self.absent]
        lines = []
        for section, behaviours in self.sections.items():
            lines += [f"### {section}", "", f"| behaviour | {' | '.join(names)} |"]
            lines.append("|---" * (len(names) + 1) + "|")
            for behaviour, cells in behaviours.items():
                words = [WORDS.get(cells.get(name, ""), "–") for name in names]
                lines.append(f"| {behaviour} | {' | '.join(words)} |")
            lines.append("")
        return "\n".join(lines)

    def as_text(self) -> list[str]:
        """For a terminal."""
        names = [column for column in self.columns if column not in self.absent]
        widths = [max(len(name), 8) for name in names]
        behaviours = [b for group in self.sections.values() for b in group]
        left = max([*(len(b) for b in behaviours), 9]) + 2
        head = "behaviour".ljust(left) + "".join(
            name.ljust(width + 2) for name, width in zip(names, widths, strict=True)
        )
        lines = [head.rstrip()] if names else []
        for section, group in self.sections.items():
            if not any(name in cells for cells in group.values() for name in names):
                continue
            lines.append(f"-- {section}")
            for behaviour, cells in group.items():
                words = [WORDS.get(cells.get(name, ""), "–") for name in names]
                row = behaviour.ljust(left) + "".join(
                    word.ljust(width + 2) for word, width in zip(words, widths, strict=True)
                )
                lines.append(row.rstrip())
        for name in names:
            counted = self.counts().get(name, {})
            words = [f"{number} {WORDS[outcome]}" for outcome, number in sorted(counted.items())]
            lines.append(f"{name} ({self.columns[name]}): {', '.join(words)}")
        lines += [f"{name}: NOT RUN: {why}" for name, why in self.absent.items()]
        return lines
