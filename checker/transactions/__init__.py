"""Transactions: which isolation level a history of multi-key transactions still can be of."""

from __future__ import annotations

from checker.transactions.check import ISOLATION_LEVELS, check_transactions

__all__ = ["ISOLATION_LEVELS", "check_transactions"]
