"""A program whose first thread ends while another goes on: the kernel shows such a process as a zombie."""

from __future__ import annotations

__all__ = ["HEADLESS"]

HEADLESS = """
import ctypes, os, platform, threading, time

def wait_for_it():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    os.write(1, f"headless {os.getpid()}\\n".encode())
    while True:
        time.sleep(0.01)

threading.Thread(target=wait_for_it).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit(2), which ends one thread
"""
"""Writes "headless PID" once its first thread has ended, and goes on."""
