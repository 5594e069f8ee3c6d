"""Transactions: which isolation levels a history of multi-key transactions may satisfy."""

from __future__ import annotations

from checker.transactions.check import ISOLATION_LEVELS, check_transactions

__all__ = ["ISOLATION_LEVELS", "check_transactions"]
