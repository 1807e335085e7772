"""Measuring one artifact on one device: rounds, repetitions, calibration, figures with intervals, health checks."""
