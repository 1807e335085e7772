"""Readings of a device's condition, one file per source.

A probe is a function of a `Tree` (the device's /proc and /sys). It returns a value or raises `Unread` with the reason,
which the user sees; it never returns a made-up zero.
"""
