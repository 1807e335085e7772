"""Sensors of a device: temperature, CPU load and clock, power, memory.

A probe reads a `Tree` (the device's /proc and /sys). It returns a value or raises `Unread` with the reason, which the
user sees; it never returns a made-up zero.
"""
