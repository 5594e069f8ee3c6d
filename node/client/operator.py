"""An operator's requests to a broker group, as made by `python -m node transfer` and `python -m node members`."""

from __future__ import annotations

from node.dledger.tools import GroupRefuses, change_members, give_lead

__all__ = ["GroupRefuses", "change_members", "give_lead"]
