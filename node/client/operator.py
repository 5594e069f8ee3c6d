"""What an operator asks a broker group from outside, as `python -m node transfer` and `python -m node members` do."""

from __future__ import annotations

from node.dledger.tools import GroupRefuses, change_members, give_lead

__all__ = ["GroupRefuses", "change_members", "give_lead"]
